from slurmbridge.topology.labels import (
    ACCELERATOR_LEVELS,
    ZONE_KEY,
    LabelLevel,
    read_labels,
    topograph_levels,
)

RACK = LabelLevel("example.org/rack")
ZONE = LabelLevel(ZONE_KEY)


def read(labels, levels=(RACK, ZONE), **options):
    reading = read_labels(labels, levels, **options)
    (places,) = reading.stated
    return places, reading.problems


def node(rack=None, zone=None):
    labels = {RACK.key: rack, ZONE.key: zone}
    return {key: value for key, value in labels.items() if value is not None}


def test_levels_are_called_by_the_last_part_of_their_key_or_as_the_site_wants():
    places, _ = read({"n1": node("r1", "a")})
    assert places.levels == ("rack", "zone")
    places, _ = read({"n1": node("r1")}, (LabelLevel(RACK.key, "cabinet"),))
    assert places.levels == ("cabinet",)


def test_keys_may_be_given_from_the_root():
    places, _ = read({"n1": node("r1", "a")}, (ZONE, RACK), root_first=True)
    assert (places.levels, places.of["n1"]) == (("rack", "zone"), ("r1", "a"))


def test_the_same_rack_name_in_two_zones_is_two_racks_and_reported():
    places, problems = read({"n1": node("r1", "a"), "n2": node("r1", "b"), "n3": node("r2", "b")})
    assert places.of == {"n1": ("a/r1", "a"), "n2": ("b/r1", "b"), "n3": ("r2", "b")}
    assert [p.path for p in problems] == ["labels:example.org/rack"]


def test_a_missing_upper_label_is_taken_from_the_others_in_the_rack():
    places, problems = read({"n1": node("r1", "a"), "n2": node("r1")})
    assert places.of["n2"] == ("r1", "a")
    assert not problems


def test_a_node_that_could_be_in_either_of_two_racks_of_a_name_has_no_rack():
    places, problems = read({"n1": node("r1", "a"), "n2": node("r1", "b"), "n3": node("r1")})
    assert places.of["n3"] == (None, None)
    assert len(problems) == 2


def test_empty_values_are_no_values_and_nodes_without_any_label_are_not_stated():
    places, _ = read({"n1": node("", "a"), "n2": node(), "n3": node("", "")})
    assert places.of == {"n1": (None, "a")}


def test_topographs_tiers_are_found_in_order_and_any_number_of_them():
    labels = {f"n{i}": {f"fabric.topograph.run/tier-{t}": "x" for t in range(12)} for i in range(2)}
    labels["n0"]["fabric.topograph.run/tier-01"] = "no tier"
    assert [level.name for level in topograph_levels(labels)] == [f"tier-{t}" for t in range(12)]


def test_the_accelerator_dimension_has_a_domain_and_perhaps_a_sub_domain():
    labels = {
        "n1": {
            "accelerator.topograph.run/domain": "d1",
            "accelerator.topograph.run/sub-domain": "s1",
        },
        "n2": {"accelerator.topograph.run/domain": "d1"},
    }
    places, _ = read(labels, ACCELERATOR_LEVELS, side=True)
    assert places.levels == ("sub-accelerator", "accelerator")
    assert places.of == {"n1": ("s1", "d1"), "n2": (None, "d1")}
    assert places.side


def test_labels_state_no_order_so_nodes_come_by_the_names_of_their_domains_and_their_own():
    labels = {
        "n10": {"rack": "r2"}, "n9": {"rack": "r2"}, "n1": {"rack": "r10"}, "n2": {},
    }  # fmt: skip
    (places,) = read_labels(labels, [LabelLevel("rack"), LabelLevel("zone")]).stated
    assert list(places.of) == ["n9", "n10", "n1"]
