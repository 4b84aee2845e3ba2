import msgspec
import pytest

from extender.filter import Freshness, Situation, choose, freshness_of, grade, spare
from slurmbridge.pool import keys
from slurmbridge.pool.policy import IdentityRule, Policy
from slurmbridge.pool.reason import ABOUT, Reason
from slurmbridge.pool.record import GpuRequest, PodRecord
from slurmbridge.pool.verdict import compile_view
from tests.support.pool_view import NOW, make_node, make_view

POLICY = Policy("c1")
FRESH, STALE, BLIND = Freshness


def pod(gpus=1, **fields):
    gpu = GpuRequest(gpus) if gpus else None
    fields = {"uid": "p1", "namespace": "team-a", "name": "x", "phase": "Pending"} | fields
    return PodRecord(gpu=gpu, **fields)


def there(
    *nodes, held=(), freshness=FRESH, policy=POLICY, pinned="", outside=("x", "y", "outside")
):
    view = make_view(*nodes, held=held)
    return Situation(compile_view(view), policy, freshness, NOW, set(outside), pinned)


def passed(answer, names):
    return [names[i] for i in answer.passed]


POOL = (make_node("a"), make_node("b", free=0), make_node("c", blocked="DRAIN"))
NAMES = ["a", "b", "c"]


class TestChoose:
    def test_only_nodes_that_fit_pass_and_nothing_else_is_told(self):
        answer = choose(pod(), NAMES, there(*POOL))
        assert ["a"] == passed(answer, NAMES)
        assert {} == answer.refused
        assert {Reason.GPU_BUSY: 1, Reason.SLURM_STATE: 1} == answer.reasons

    def test_when_none_fits_each_node_has_its_reason(self):
        answer = choose(pod(9), NAMES, there(*POOL))
        expected = {"a": Reason.GPU_TOTAL, "b": Reason.GPU_TOTAL, "c": Reason.SLURM_STATE}
        assert {name: r.text for name, r in expected.items()} == answer.refused
        assert () == tuple(answer.passed)

    def test_the_best_few_are_answered_in_the_order_of_the_request(self):
        nodes = [make_node(f"n{i:02d}", free=8 if i % 2 else 4) for i in range(60)]
        names = [n.kube_node for n in nodes]
        found = passed(choose(pod(2), names, there(*nodes)), names)
        assert POLICY.candidates == len(found)
        assert sorted(found) == found
        assert all(int(name[1:]) % 2 == 0 for name in found), "partly used nodes first"

    def test_the_number_of_candidates_is_the_sites_choice(self):
        nodes = [make_node(f"n{i}") for i in range(9)]
        names = [n.kube_node for n in nodes]
        policy = Policy("c1", candidates=3)
        assert 3 == len(choose(pod(), names, there(*nodes, policy=policy)).passed)
        policy = Policy("c1", candidates=9)
        assert 9 == len(choose(pod(), names, there(*nodes, policy=policy)).passed)

    def test_a_pod_without_pool_gpus_passes_untouched_on_any_node(self):
        assert choose(pod(0), NAMES, there(*POOL)).all
        assert choose(pod(0), NAMES, there(*POOL, freshness=BLIND)).all

    def test_nodes_outside_the_pool_pass_untouched(self):
        assert choose(pod(), ["x", "y"], there(*POOL)).all
        names = ["x", "b", "a", "y"]
        assert ["x", "a", "y"] == passed(choose(pod(), names, there(*POOL)), names)
        names = ["x", "b"]
        assert ["x"] == passed(choose(pod(), names, there(*POOL)), names)

    def test_an_empty_request_is_answered_with_nothing(self):
        assert choose(pod(), [], there(*POOL)).all

    def test_the_same_question_has_the_same_answer(self):
        nodes = [make_node(f"n{i}") for i in range(60)]
        names = [n.kube_node for n in nodes]
        situation = there(*nodes)
        assert choose(pod(), names, situation) == choose(pod(), names, situation)

    @pytest.mark.parametrize("source", ["held", "pinned"])
    @pytest.mark.parametrize("freshness", [FRESH, STALE])
    def test_a_claimed_pod_goes_home_only(self, source, freshness):
        how = {"held": [("p1", "c", 5)]} if source == "held" else {"pinned": "c"}
        situation = there(*POOL, freshness=freshness, **how)
        assert ["c"] == passed(choose(pod(), NAMES, situation), NAMES)
        refused = choose(pod(), ["a", "b"], situation).refused
        assert dict.fromkeys(["a", "b"], Reason.CLAIMED_ELSEWHERE.text) == refused
        assert ["x"] == passed(choose(pod(), ["a", "x"], situation), ["a", "x"])

    def test_a_claimed_pod_needs_no_leave_of_the_policy_any_more(self):
        strict = Policy("c1", identities=(IdentityRule(("nobody",)),))
        situation = there(*POOL, held=[("p1", "a", 5)], policy=strict)
        assert ["a"] == passed(choose(pod(), NAMES, situation), NAMES)

    def test_a_refusal_by_policy_tells_why_and_is_the_same_everywhere(self):
        odd = pod(annotations={keys.ACCOUNT: "root; rm -rf /"})
        answer = choose(odd, NAMES, there(*POOL))
        assert {Reason.ANNOTATION: 3} == answer.reasons
        text = "slurmbridge: annotation is not valid: annotation slurmbridge.dev/account is not"
        assert {f"{text} a Slurm name"} == set(answer.refused.values())

    def test_a_refusal_by_policy_leaves_other_nodes_alone(self):
        odd = pod(annotations={keys.ACCOUNT: "-x"})
        names = ["a", "x"]
        assert ["x"] == passed(choose(odd, names, there(*POOL)), names)

    def test_a_fault_in_the_request_is_a_refusal_and_cut_to_size(self):
        faulty = pod(0, fault="x" * 5000)
        answer = choose(faulty, NAMES, there(*POOL))
        assert {Reason.REQUEST: 3} == answer.reasons
        assert all(len(text) == 200 for text in answer.refused.values())

    def test_a_member_of_a_group_waits_for_its_plan(self):
        member = pod(annotations={keys.GROUP: "g"})
        assert {Reason.NO_PLAN: 3} == choose(member, NAMES, there(*POOL)).reasons
        planned = there(*POOL, held=[("p1", "a", 5)])
        assert ["a"] == passed(choose(member, NAMES, planned), NAMES)


class TestNotKnowing:
    def test_stale_refuses_what_it_can_and_else_asks_to_come_again(self):
        stale = there(*POOL, freshness=STALE)
        assert Reason.STALE.text == choose(pod(), NAMES, stale).error
        assert 3 == len(choose(pod(9), NAMES, stale).refused)
        assert Reason.STALE.text == choose(pod(), ["a", "x"], stale).error
        assert ["x"] == passed(choose(pod(), ["b", "x"], stale), ["b", "x"])

    def test_blind_is_an_error_but_among_nodes_that_were_seen_outside_the_pool(self):
        blind = there(*POOL, freshness=BLIND)
        assert Reason.BLIND.text == choose(pod(), NAMES, blind).error
        assert Reason.BLIND.text == choose(pod(9), NAMES, blind).error
        assert Reason.BLIND.text == choose(pod(), ["x", "new"], blind).error
        assert choose(pod(), ["x", "y"], blind).all

    @pytest.mark.parametrize("size", [1, 9])
    def test_a_node_that_has_come_while_the_view_is_stale_waits_to_be_known(self, size):
        stale = there(*POOL, freshness=STALE)
        assert Reason.STALE.text == choose(pod(size), ["new"], stale).error
        assert Reason.STALE.text == choose(pod(size), ["b", "new"], stale).error
        led = msgspec.structs.replace(stale, is_led=True)
        assert {"new": Reason.SLURM_SILENT.text} == choose(pod(size), ["new"], led).refused
        assert ["x"] == passed(choose(pod(size), ["x", "new"], led), ["x", "new"])
        assert choose(pod(size), ["new"], there(*POOL)).all

    def test_only_what_a_fresh_view_lacks_is_told_to_be_outside(self):
        found = choose(pod(), ["a", "x", "b", "y"], there(*POOL))
        assert [1, 3] == list(found.outside)
        assert [0] == list(choose(pod(), ["x"], there(*POOL)).outside)

    def test_while_a_bridge_leads_a_pod_waits_for_its_word_instead_of_coming_again(self):
        for freshness in (STALE, BLIND):
            led = msgspec.structs.replace(there(*POOL, freshness=freshness), is_led=True)
            answer = choose(pod(), NAMES, led)
            assert "" == answer.error
            assert dict.fromkeys(NAMES, Reason.SLURM_SILENT.text) == answer.refused
        stale = msgspec.structs.replace(there(*POOL, freshness=STALE), is_led=True)
        assert ["x"] == passed(choose(pod(), ["a", "x"], stale), ["a", "x"])

    def test_blind_does_not_believe_an_old_claim_either(self):
        blind = there(*POOL, freshness=BLIND, held=[("p1", "a", 5)])
        assert Reason.BLIND.text == choose(pod(), NAMES, blind).error

    def test_without_a_policy_any_pod_may_be_ours(self):
        assert Reason.BLIND.text == choose(pod(0), ["x"], there(*POOL, policy=None)).error

    def test_without_a_view_any_node_may_be_ours(self):
        nothing = Situation(None, POLICY, BLIND, 0.0, set())
        assert Reason.BLIND.text == choose(pod(), ["x"], nothing).error
        assert choose(pod(0), ["x"], nothing).all
        assert [0] == grade(pod(), ["x"], nothing)
        assert [] == spare(pod(), ["x"], nothing)

    @pytest.mark.parametrize(
        ("age_s", "interval_s", "expected"),
        [
            (None, 1.0, BLIND),
            (0.0, 1.0, FRESH),
            (5.0, 1.0, FRESH),
            (5.1, 1.0, STALE),
            (30.0, 1.0, STALE),
            (30.1, 1.0, BLIND),
            (8.0, 4.0, FRESH),
            (8.1, 4.0, STALE),
            (39.0, 20.0, FRESH),
            (40.1, 20.0, BLIND),
        ],
    )
    def test_freshness(self, age_s, interval_s, expected):
        assert expected is freshness_of(age_s, interval_s, 5.0, 30.0)


class TestGrade:
    def test_the_tightest_fit_gets_ten_and_others_less(self):
        nodes = (make_node("a"), make_node("b", free=2), make_node("c", free=5))
        assert [8, 10, 9] == grade(pod(2), ["a", "b", "c"], there(*nodes))

    def test_what_is_not_ours_to_say_gets_nothing(self):
        names = ["a", "b", "x"]
        assert [10, 0, 0] == grade(pod(), names, there(*POOL))
        assert [0, 0, 0] == grade(pod(0), names, there(*POOL))
        assert [0, 0, 0] == grade(pod(), names, there(*POOL, freshness=BLIND))
        assert [0, 0, 0] == grade(pod(), names, there(*POOL, policy=None))
        assert [0, 0, 0] == grade(pod(0, fault="odd"), names, there(*POOL))
        assert [] == grade(pod(), [], there(*POOL))

    def test_a_claimed_pod_is_drawn_home(self):
        assert [0, 10] == grade(pod(), ["a", "b"], there(*POOL, held=[("p1", "b", 5)]))


class TestSpare:
    def test_pods_are_evicted_only_where_it_can_help(self):
        nodes = (
            make_node("claims", free=0, claimed=8),
            make_node("native", free=0, claimed=0, native_jobs=2),
            make_node("drained", free=0, claimed=8, blocked="DRAIN"),
            make_node("planned", free=0, claimed=8, plan_start=NOW),
        )
        names = ["claims", "native", "drained", "planned", "outside"]
        assert ["claims", "outside"] == spare(pod(8), names, there(*nodes))

    def test_a_pod_that_may_not_come_evicts_nobody(self):
        node = make_node("claims", free=0, claimed=8)
        names = ["claims", "outside"]
        for asker in (pod(annotations={keys.QOS: "!"}), pod(0, fault="odd")):
            assert ["outside"] == spare(asker, names, there(node))
        assert ["outside"] == spare(pod(), names, there(node, held=[("p1", "claims", 1)]))

    def test_not_knowing_spares_all_pool_nodes(self):
        node = make_node("claims", free=0, claimed=8)
        for freshness in (STALE, BLIND):
            situation = there(node, freshness=freshness)
            assert ["outside"] == spare(pod(), ["claims", "outside"], situation)
        assert [] == spare(pod(0), ["claims"], there(node, policy=None))

    def test_pods_without_pool_gpus_preempt_as_ever(self):
        assert ["a", "x"] == spare(pod(0), ["a", "x"], there(*POOL))


def test_texts_are_stable_over_views_and_times():
    """A text that changes makes kube-scheduler try the pod again as fast as it can."""
    seen = set()
    for moment in range(50):
        nodes = [make_node(f"n{i}", free=(i + moment) % 3) for i in range(9)]
        situation = there(*nodes)
        moved = msgspec.structs.replace(situation, now=NOW + 17 * moment)
        seen.update(choose(pod(4), [f"n{i}" for i in range(9)], moved).refused.values())
    assert {ABOUT[Reason.GPU_BUSY].text} == seen
