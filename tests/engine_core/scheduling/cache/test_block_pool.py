from engine_core.scheduling.cache.block_pool import BlockPool
from engine_core.scheduling.sequence import chain_hash, root_hash


def published(pool: BlockPool, *names: str) -> list[int]:
    """Blocks that are taken together, each published under its own hash."""
    blocks = pool.take(len(names))
    for block, name in zip(blocks, names, strict=True):
        pool.publish(block, name.encode())
    return blocks


def test_hashes_depend_on_all_that_came_before_and_on_the_salt() -> None:
    tokens = [1, 2, 3, 4]
    hashes = [
        chain_hash(root_hash(""), tokens),
        chain_hash(root_hash("mine"), tokens),
        chain_hash(chain_hash(root_hash(""), tokens), tokens),
        chain_hash(root_hash(""), [4, 3, 2, 1]),
        chain_hash(root_hash(""), [1, 2, 3]),
    ]
    assert len(set(hashes)) == len(hashes)
    assert all(len(hash) == 16 for hash in hashes)


def test_hashes_are_the_same_in_every_process() -> None:
    assert chain_hash(root_hash(""), [1, 2]).hex() == "995c06853284bbb846771fbc0096230b"


def test_fresh_blocks_come_in_a_row() -> None:
    pool = BlockPool(8)
    assert pool.take(3) == [0, 1, 2]
    assert pool.take(2) == [3, 4]
    assert (pool.free, pool.usage) == (3, 5 / 8)


def test_a_table_grows_without_a_gap_if_it_can() -> None:
    pool = BlockPool(8)
    first = pool.take(2)
    pool.release(pool.take(3))
    pool.release([first.pop(0)])
    assert pool.take(2, after=first[-1]) == [2, 3]


def test_growing_without_a_gap_is_not_worth_a_published_block() -> None:
    pool = BlockPool(4)
    first, second = published(pool, "a", "b")
    pool.release([second])
    assert pool.take(1, after=first) == [2]
    assert pool.find(b"b") == second


def test_a_hit_revives_a_free_block_and_shares_a_used_one() -> None:
    pool = BlockPool(4)
    (block,) = published(pool, "a")
    pool.release([block])
    assert (pool.free, pool.users(block)) == (4, 0)
    pool.share([block])
    pool.share([block])
    assert (pool.free, pool.users(block)) == (3, 2)
    pool.release([block])
    assert (pool.free, pool.users(block)) == (3, 1)
    assert block not in pool.take(3)


def test_the_longest_unused_goes_first_and_ends_before_beginnings() -> None:
    pool = BlockPool(6)
    old = published(pool, "a", "b")
    new = published(pool, "c", "d")
    pool.release(old)
    pool.release(new)
    plain = [4, 5]
    assert pool.take(6) == [*plain, old[1], old[0], new[1], new[0]]
    assert pool.find(b"a") is None


def test_a_used_hit_becomes_the_newest() -> None:
    pool = BlockPool(2)
    old, new = published(pool, "a", "b")
    pool.release([old])
    pool.release([new])
    pool.share([old])
    pool.release([old])
    assert pool.take(1) == [new]


def test_equal_content_is_published_once() -> None:
    pool = BlockPool(2)
    first, second = published(pool, "a", "a")
    assert pool.find(b"a") == first
    pool.release([second])
    assert pool.find(b"a") == first


def test_withdraw_all_leaves_users_and_finds_nothing() -> None:
    pool = BlockPool(2)
    used, unused = published(pool, "a", "b")
    pool.release([unused])
    pool.withdraw_all()
    assert pool.find(b"a") is None and pool.find(b"b") is None
    assert pool.users(used) == 1
    pool.publish(used, b"c")
    assert pool.find(b"c") == used
