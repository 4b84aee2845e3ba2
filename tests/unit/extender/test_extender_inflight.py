from extender.inflight import MAX_BINDS, MAX_SIZES, UNSEEN, InFlight, Size
from slurmbridge.pool.record import GpuRequest
from slurmbridge.pool.verdict import compile_view
from tests.support.pool_view import make_node, make_view

FOUR = Size(GpuRequest(4), 8, 1000)


def begun(uid="p1", node="a", *, size=FOUR, until=100.0):
    book = InFlight()
    if size is not None:
        book.remember(uid, size)
    book.begin(uid, node, "t1", until)
    return book


def free_of(book, *nodes, but=""):
    index = compile_view(make_view(*(nodes or (make_node("a"), make_node("b")))))
    return index.with_taken(book.taken(index, but=but)).free[0].tolist()


def test_a_bind_takes_what_filter_saw_the_pod_ask_for():
    assert [4, 8] == free_of(begun())


def test_a_pod_that_another_replica_filtered_takes_one_until_the_grant_says_more():
    book = begun(size=None)
    assert [7, 8] == free_of(book)
    book.grant("p1", 5, "0-2,7", generation=9, until=100.0)
    assert [4, 8] == free_of(book)


def test_a_pod_does_not_stand_in_its_own_way():
    assert [8, 8] == free_of(begun(), but="p1")


def test_a_bind_on_a_node_that_left_the_pool_takes_nothing():
    assert [8] == free_of(begun(node="gone"), make_node("a"))


def test_a_refused_claim_takes_nothing():
    book = begun()
    book.end("p1")
    assert [8, 8] == free_of(book)


def test_a_grant_pins_the_pod_and_a_mere_question_does_not():
    book = begun()
    assert "" == book.home_of("p1")
    book.grant("p1", 5, "", generation=9, until=100.0)
    assert "a" == book.home_of("p1")
    assert "" == book.home_of("p2")


def test_the_view_that_holds_the_claim_ends_the_entry():
    book = begun()
    book.grant("p1", 5, "", generation=9, until=100.0)
    book.settle(make_view(make_node("a"), generation=8), 0.0)
    assert 1 == len(book)
    book.settle(make_view(make_node("a"), generation=9), 0.0)
    assert 0 == len(book)


def test_a_view_of_another_leader_ends_the_entry():
    book = begun()
    book.grant("p1", 5, "", generation=9, until=100.0)
    book.settle(make_view(make_node("a"), generation=1, term="t2"), 0.0)
    assert 0 == len(book)


def test_an_entry_without_an_answer_stays_to_its_time_whatever_the_view():
    book = begun(until=100.0)
    book.settle(make_view(make_node("a"), generation=99), 99.0)
    assert 1 == len(book)
    book.keep("p1", 120.0)
    book.settle(None, 119.0)
    assert 1 == len(book)
    book.settle(None, 120.0)
    assert 0 == len(book)


def test_answers_for_entries_that_are_gone_change_nothing():
    book = InFlight()
    book.grant("p1", 5, "0", generation=1, until=9.0)
    book.keep("p1", 9.0)
    book.end("p1")
    assert (0, 0) == (len(book), book.version)


def test_every_change_has_a_version_of_its_own():
    book = begun()
    seen = [book.version]
    book.grant("p1", 5, "0-3", generation=1, until=9.0)
    seen.append(book.version)
    book.end("p1")
    seen.append(book.version)
    assert 3 == len(set(seen))


def test_the_book_is_bounded():
    book = InFlight()
    for i in range(MAX_BINDS):
        assert not book.is_full
        book.begin(f"p{i}", "a", "t", 1.0)
    assert book.is_full
    for i in range(MAX_SIZES + 10):
        book.remember(f"p{i}", FOUR)
    book.begin("p0", "a", "t", 1.0)
    assert UNSEEN == next(iter(book)).size, "the oldest is forgotten first"


def test_an_unreadable_index_list_keeps_the_size_that_was_asked():
    book = begun()
    book.grant("p1", 5, "what?", generation=1, until=9.0)
    assert [4, 8] == free_of(book)


def test_plain_pods_are_those_that_filter_saw_ask_for_nothing():
    book = InFlight()
    assert not book.is_plain("p1")
    book.remember("p1", None)
    assert book.is_plain("p1")
    book.remember("p1", FOUR)
    assert not book.is_plain("p1")
