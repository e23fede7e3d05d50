"""Each view of the demo in headless Chromium: what a person sees, presses and types."""

import time

import pytest
from helpers.demo_page import (
    PPO,
    SFT,
    answers,
    choose,
    cut_off,
    findings,
    message_of,
    press,
    scores,
    stops_before,
    wait_for,
)
from helpers.processes import PATIENCE

from lightrlhf.demo.votes import read_votes

pytest.importorskip("gradio", reason="needs pip install -e '.[demo]'")


WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}


# -------------------------------------------------------------------------------------------------------------- chat
def test_chat_in_a_browser(page):
    press(page, "Could I get a large oat latte and two muffins, please?")
    message = message_of(page)
    wait_for(lambda: message.input_value() == "Could I get a large oat latte and two muffins, please?")
    press(page, "Send")
    page.locator("#dialogue .scores").wait_for()
    (first,) = answers(page)
    assert "reward" not in first and message.input_value() == ""
    assert all(name in scores(page)[0] for name in ("reward ", "KL ", "tokens"))
    press(page, "Tokens")
    page.locator(".token").first.wait_for()
    press(page, "Tokens")
    wait_for(lambda: answers(page) == [first])
    message.fill("And a scone.")
    message.press("Enter")
    wait_for(lambda: len(scores(page)) == 2)
    second = answers(page)[1]
    press(page, "Regenerate")
    wait_for(lambda: len(scores(page)) == 2 and answers(page)[1:] not in ([], [second]))
    assert answers(page)[0] == first
    press(page, "Clear")
    page.locator(".suggestion").first.wait_for()
    assert not answers(page)


def test_an_empty_message_is_a_hint_at_the_box(page):
    page.locator(".suggestion").first.wait_for()
    press(page, "Send")
    page.get_by_text("Type a message first.").wait_for()
    assert page.locator(".toast-body").count() == 0 and page.locator(".suggestion").count() == 4


def test_an_edited_message_is_answered_anew(page):
    message_of(page).fill("A tea, please.")
    press(page, "Send")
    wait_for(lambda: scores(page))
    page.locator(".user.message").hover()
    press(page, "Edit")
    box = page.get_by_label("Your message").locator("visible=true").last
    box.fill("Two scones, please.")
    box.press("Escape")
    assert page.locator(".user .text").inner_text() == "A tea, please."
    page.locator(".user.message").hover()
    press(page, "Edit")
    page.locator(".editing textarea").fill("Two scones, please.")
    press(page, "Save and answer")
    wait_for(lambda: page.locator(".user .text").all_inner_texts() == ["Two scones, please."] and scores(page))


def test_only_the_answer_is_copied(page):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    message_of(page).fill("A tea, please.")
    press(page, "Send")
    wait_for(lambda: scores(page))
    page.locator(".bot.message").get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == answers(page)[0]


def test_a_stream_is_visible_and_can_be_stopped(page):
    choose(page, "Model", "endless")
    page.get_by_text("Generation settings").first.click()
    page.get_by_label("number input for max_new_tokens").first.fill("1000")
    page.get_by_label("number input for max_new_tokens").first.press("Enter")
    message_of(page).fill("Write a long text.")
    press(page, "Send")
    wait_for(lambda: answers(page) and answers(page)[0].strip())
    before = answers(page)[0]
    wait_for(lambda: len(answers(page)[0]) > len(before))
    press(page, "Stop")
    page.get_by_text("tokens, truncated").wait_for()
    stopped = answers(page)[0]
    time.sleep(0.5)
    assert answers(page)[0] == stopped and int(scores(page)[0].split(" tokens")[0].split()[-1]) < 1000
    page.get_by_role("button", name="Send", exact=True).wait_for()


def test_a_damaged_checkpoint_is_a_message_and_the_demo_keeps_running(page):
    choose(page, "Model", "damaged step 2")
    message_of(page).fill("A tea, please.")
    press(page, "Send")
    page.get_by_text("model.safetensors").wait_for()
    page.locator(".toast-body").click()
    wait_for(lambda: page.locator(".toast-body").count() == 0)
    choose(page, "Model", SFT)
    press(page, "Regenerate")
    page.get_by_text("KL ").wait_for()
    assert len(answers(page)) == 1


# ------------------------------------------------------------------------------------------------------ side by side
def test_side_by_side_in_a_browser(page):
    page.get_by_role("tab", name="Side by side").click()
    message_of(page).fill("A tea, please.")
    for _ in range(2):  # the damaged and the endless one
        page.get_by_role("button", name="Remove").nth(0).click()
    press(page, "Send to all")
    page.locator("#answers .scores").nth(1).wait_for()
    assert page.locator("#answers h2").all_inner_texts() == [SFT, PPO]
    boxes = [card.bounding_box() for card in page.locator("#answers .card").all()]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] < boxes[1]["x"]
    page.set_viewport_size(PHONE)
    boxes = [card.bounding_box() for card in page.locator("#answers .card").all()]
    assert boxes[0]["x"] == boxes[1]["x"] and boxes[0]["y"] < boxes[1]["y"] and boxes[0]["width"] > 280


# ----------------------------------------------------------------------------------------------------- compare blind
def test_keys_vote_and_a_vote_is_undone(page, world):
    page.get_by_role("tab", name="Compare blind").click()
    page.get_by_label("Your name").fill("kay 1")  # a number typed into a field is no vote
    press(page, "Next pair")
    page.get_by_role("button", name="A is better", disabled=False).wait_for()
    before, shown = len(votes_of(world)), page.locator("#pair").inner_text()
    page.get_by_placeholder("Comment (optional)").press("2")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("2")
    page.get_by_text("Voted: B is better").wait_for()
    assert votes_of(world)[-1]["verdict"] == "B" and votes_of(world)[-1]["comment"] == "2"
    press(page, "Undo last vote")
    page.get_by_text("Your last vote is withdrawn").wait_for()
    wait_for(lambda: page.locator("#pair").inner_text() == shown)
    assert len(votes_of(world)) == before
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("1")
    page.get_by_text("Voted: A is better").wait_for()
    assert votes_of(world)[-1]["verdict"] == "A"


def votes_of(world) -> list[dict]:
    return read_votes(world["votes"])


@pytest.mark.slow
def test_two_raters_vote_once_each_and_votes_survive_a_kill(page, browser, server, world):
    world["votes"].unlink(missing_ok=True)
    other = browser.new_page()
    other.goto(server())
    for visitor, rater in ((page, "ada"), (other, "grace")):
        visitor.get_by_role("tab", name="Compare blind").click()
        visitor.get_by_label("Your name").fill(rater)
        press(visitor, "Next pair")
    for visitor in (page, other):
        visitor.get_by_role("button", name="A is better", disabled=False).wait_for()
    assert page.locator("#pair .prompt").inner_text() == other.locator("#pair .prompt").inner_text()
    page.get_by_placeholder("Comment (optional)").fill("politer")
    page.get_by_role("button", name="A is better").dblclick()
    press(other, "Tie")
    wait_for(lambda: len(votes_of(world)) == 2)
    other.get_by_role("button", name="A is better", disabled=False).wait_for()
    world["servers"][-1].kill()
    world["servers"][-1].wait(PATIENCE)
    with world["votes"].open("a") as file:
        file.write('{"pair": "half a li')
    page.goto(server())
    page.get_by_role("tab", name="Compare blind").click()
    page.get_by_text("Agreement on the 1 pairs").wait_for()
    page.get_by_label("Your name").fill("ada")
    press(page, "Next pair")
    page.get_by_role("button", name="Skip", disabled=False).click()
    wait_for(lambda: len(votes_of(world)) == 3)
    votes = [(vote["rater"], vote["comment"]) for vote in votes_of(world) if vote["rater"] == "ada"]
    assert votes == [("ada", "politer"), ("ada", "")]
    assert len({vote["pair"] for vote in votes_of(world)}) == 2


# --------------------------------------------------------------------------------------------------------- every view
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_axe_finds_nothing_and_nothing_is_cut_off(page, size, scheme):
    page.set_viewport_size(size)
    page.emulate_media(color_scheme=scheme)
    page.reload()
    send = page.get_by_role("button", name="Send", exact=True)
    send.wait_for()
    page.locator(".suggestion").first.wait_for()
    box = send.bounding_box()
    assert box["y"] + box["height"] <= size["height"]  # the first screen has the input
    found = {"empty": findings(page)}
    message_of(page).fill("A tea, please.")
    press(page, "Send")
    wait_for(lambda: scores(page))
    press(page, "Tokens")
    page.locator(".token").first.wait_for()
    page.get_by_text("Generation settings").first.click()
    for tab in page.get_by_role("tab").all():
        assert tab.is_visible()  # none behind a menu
        tab.click()
        page.locator("[role=tabpanel]").locator("visible=true").wait_for()
        found[tab.inner_text()] = findings(page)
        assert cut_off(page) == [], tab.inner_text()
    assert found == dict.fromkeys(found, [])
    assert list(found) == ["empty", "Chat", "Side by side", "Compare blind", "Runs", "Rollouts"]


def test_the_message_box_is_at_hand(page):
    message = message_of(page)
    wait_for(lambda: message.evaluate("box => box === document.activeElement"))  # with a mouse it has the focus
    assert stops_before(page, message) <= 7  # of them four suggestions
    page.evaluate("document.activeElement.blur()")
    page.get_by_text("Skip to the message").focus()
    page.keyboard.press("Enter")
    assert message.evaluate("box => box === document.activeElement")


def test_arrow_keys_choose_a_tab(page):
    page.get_by_role("tab", name="Chat").focus()
    page.keyboard.press("ArrowRight")
    page.get_by_role("button", name="Send to all").wait_for()
    page.keyboard.press("End")
    wait_for(lambda: page.get_by_role("tab").last.get_attribute("aria-selected") == "true")
    page.keyboard.press("ArrowRight")
    page.get_by_role("button", name="Send", exact=True).wait_for()
