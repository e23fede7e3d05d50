"""A trainer's side of sessions: an OpenAI program runs at the session's address, its trace comes back checked."""

import os

import pytest
from helpers import save_model
from helpers.serving import serving

from lightrlhf.generation.server_client import HttpThread, InvalidResponse, ServerClient, UnusableServer
from lightrlhf.generation.session_client import open_session, session_of

QUESTION = {"role": "user", "content": "a tea, please"}


@pytest.fixture(scope="module")
def server(tmp_path_factory, tokenizer):
    folder = save_model("llama", tmp_path_factory.mktemp("served"), tokenizer, max_position_embeddings=512)
    tokenizer.save_pretrained(folder)
    with serving(folder) as (url, _):
        http = HttpThread(30.0)
        yield ServerClient(http, url, "--rollout_server")
        http.close()


def test_a_program_of_openai_runs_at_the_sessions_address(server):
    openai = pytest.importorskip("openai")

    async def agent(base_url: str, key: str) -> list[str]:
        messages, replies = [QUESTION], []
        async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
            for number in range(3):
                asked = {"model": "any", "messages": messages}
                if number == 1:
                    stream = await client.chat.completions.create(**asked, stream=True)
                    text = "".join([part.choices[0].delta.content or "" async for part in stream if part.choices])
                else:
                    text = (await client.chat.completions.create(**asked)).choices[0].message.content
                replies.append(text)
                messages = [*messages, {"role": "assistant", "content": text}, QUESTION]
            with pytest.raises(openai.BadRequestError, match="temperature"):
                await client.chat.completions.create(**asked, temperature=0.2)
            with pytest.raises(openai.AuthenticationError):
                await client.completions.create(model="any", prompt="Hello")
        return replies

    async def run():
        async with session_of(server, max_tokens=8, seed=5) as session:
            assert os.environ["OPENAI_API_KEY"] != session.key
            return await agent(session.base_url, session.key), await session.trace(), session

    replies, trace, session = server.http.start(run()).result()
    assert [turn.reply["content"] for turn in trace.turns] == replies
    assert [row.began for row in trace.rows] == ["first"] and trace.counts["rows_first"] == 1
    with pytest.raises(UnusableServer, match="session"):
        server.http.start(session.trace()).result()


@pytest.mark.parametrize(
    "answer",
    [
        None,
        "text",
        {},
        {"rows": [{"ids": [1], "mask": [], "logprobs": [], "began": "first"}], "turns": [], "counts": {}},
        {"rows": [], "turns": [{}], "counts": {}},
    ],
)
def test_what_is_no_trace_is_refused(server, monkeypatch, answer):
    async def run():
        async with session_of(server) as session:
            ask = server.ask

            async def wrong(path: str, *given, **more):
                return answer if path.endswith("/trace") else await ask(path, *given, **more)

            monkeypatch.setattr(server, "ask", wrong)
            await session.trace()

    with pytest.raises(InvalidResponse, match="form"):
        server.http.start(run()).result()


@pytest.mark.parametrize("answer", [None, "text", {}, {"id": "a", "key": "b"}, {"id": 1, "key": "b", "base_url": "/c"}])
def test_what_is_no_session_is_refused(server, monkeypatch, answer):
    async def wrong(path: str, *given, **more):
        return answer

    monkeypatch.setattr(server, "ask", wrong)
    with pytest.raises(InvalidResponse, match="form"):
        server.http.start(open_session(server)).result()
