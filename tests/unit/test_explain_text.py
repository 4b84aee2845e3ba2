"""What `slurmbridge explain` prints of a gang."""

from __future__ import annotations

from slurmbridge import cli

GANG = {
    "name": "train", "kind": "own", "planned": True, "size": 2, "waits": None, "slurmJob": None, "whyNotNow": None,
    "topology": "preferred:rack@10m", "segment": "2:rack", "level": "zone", "domain": "z1",
    "spread": {"rack": 2, "node": 2}, "whyNotLower": ["no rack holds it: r3 comes closest"],
    "members": [
        {"rank": 0, "pod": "d/train-0", "node": "gpu001", "claim": "held", "jobId": 41},
        {"rank": 1, "pod": "d/train-1", "node": None, "claim": None, "jobId": None},
    ],
}  # fmt: skip
ANSWER = {
    "pod": "d/train-0", "phase": "Pending", "node": "", "asks": {"gpus": 8}, "claim": None,
    "reason": "", "group": GANG,
}  # fmt: skip


def test_a_gang_is_told_with_its_wishes_its_place_and_its_members(monkeypatch, capsys):
    monkeypatch.setattr(cli, "_ask", lambda *_, **__: ANSWER)
    assert cli.main(["explain", "d/train-0"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "group train (own), 2 pods" in lines
    assert "topology: preferred:rack@10m" in lines
    assert "segment: 2:rack" in lines
    assert "in one zone: z1, 2 racks, 2 nodes" in lines
    assert "why not lower: no rack holds it: r3 comes closest" in lines
    assert any(line.split() == ["0", "d/train-0", "gpu001", "held", "41"] for line in lines)
    assert any(line.split() == ["1", "d/train-1", "-", "no", "claim"] for line in lines)
