"""Blocks of a paged KV cache: found by the longest prefix, shared, and taken in order of use."""

from lightrlhf.generation.blocks import Blocks

IDS = [*range(20)]


def filled(blocks: Blocks, ids: list[int], namespace: str = "w") -> list[int]:
    """Blocks of a row of these ids, which are known."""
    own = blocks.take(blocks.needed(len(ids)))
    blocks.learn(namespace, ids, own)
    return own


def test_the_longest_known_prefix_is_found_without_the_last_id():
    blocks = Blocks(8, 4)
    own = filled(blocks, IDS[:10])
    assert blocks.find("w", IDS)[0] == own[:2]
    assert blocks.find("w", IDS[:8])[0] == own[:1]  # the last id is computed, for its logits
    assert blocks.find("w", [*IDS[:4], 99, *IDS[5:12]])[0] == own[:1]
    assert blocks.find("w", [99, *IDS[1:]])[0] == [] == blocks.find("other", IDS)[0]
    assert blocks.find("w", IDS[:3]) == ([], None)


def test_rows_that_read_the_same_next_block_have_its_key():
    blocks = Blocks(8, 4)
    filled(blocks, IDS[:8])
    assert blocks.find("w", [*IDS[:12], 1])[1] == blocks.find("w", [*IDS[:12], 2])[1] is not None
    assert blocks.find("w", IDS[:11])[1] is None  # no whole block follows


def test_the_least_recently_used_contents_go_first_and_a_prefix_after_what_follows_it():
    blocks = Blocks(5, 4)
    first, second = filled(blocks, IDS[:8]), filled(blocks, IDS[8:16])
    blocks.release(first)
    blocks.release(second)
    assert blocks.room() == 5 and blocks.find("w", IDS[:9])[0] == first
    taken = blocks.take(2)  # the free one, then the end of the first row
    assert taken[1] == first[1] and blocks.find("w", IDS[:9])[0] == first[:1]
    blocks.share(first[:1])
    assert blocks.room() == 2 and blocks.take(2) == second[::-1]
    assert blocks.find("w", IDS[8:17])[0] == []


def test_a_block_is_free_when_its_last_user_releases_it_and_forgotten_contents_are_not_found():
    blocks = Blocks(4, 4)
    own = filled(blocks, IDS[:8])
    blocks.share(own[:1])
    blocks.release(own)
    assert blocks.users[own[0]] == 1 and blocks.room() == 3
    blocks.forget(own)
    assert blocks.find("w", IDS)[0] == [] and blocks.room() == 3
    blocks.release(own[:1])
    assert blocks.room() == 4 and sorted(blocks.take(4)) == [0, 1, 2, 3]


def test_the_same_contents_in_two_blocks_are_known_once():
    blocks = Blocks(4, 4)
    first, second = filled(blocks, IDS[:5]), filled(blocks, IDS[:5])
    assert blocks.find("w", IDS)[0] == first[:1]
    blocks.release(second)
    assert len(blocks.free) == 2 and not blocks.idle
