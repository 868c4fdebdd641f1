"""Scenarios: tables become calls, every mistake is named, the library holds what it says, and `shoal sim` around it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from shoal.node.cli import run as shoal
from shoal.protocol.errors import ExitCode, ShoalError
from shoal.sim.faults import Fault, Flap, FullDisk, Kill, Leaving, Lie, LinkChange, Partition, Pause, Skew, SlowDisk
from shoal.sim.link import Link
from shoal.sim.scenario import Expect, Scenario, selected
from shoal.sim.scenario_file import library, load_scenario, parse_scenario

from .example_report import a_report

SMALL = """
title = "small"
until_s = 20

[run.sync]
rounds_max = 2

[[peers]]
count = 2

[expect]
rounds_min = 2
"""


def parse(text: str, *, head: str = 'title = "x"\nuntil_s = 100\n', peers: str = "[[peers]]\ncount = 4\n") -> Scenario:
    return parse_scenario(head + peers + text, "x.toml")


def mistakes(text: str, **parts: str) -> str:
    with pytest.raises(ShoalError) as caught:
        parse(text, **parts)
    assert caught.value.code == ExitCode.CONFIG
    return caught.value.values


def faults_of(text: str, **parts: str) -> list[Fault]:
    return parse(text, **parts).build(1).faults


# --- tables become calls ----------------------------------------------------------------------------------------------

LINKED = "[links.home]\nlatency_ms = [10, 30]\nup_mbps = 20\ndown_mbps = 100\nloss = 0.01\n"
HOME = Link(latency_ms=(10.0, 30.0), up_mbps=20, down_mbps=100, loss=0.01)


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        (
            'kind = "partition"\na = "p0..p1"\nat_s = 5\nheal_s = 9\n',
            Partition(a=("p0", "p1"), b=("p2", "p3"), at_s=5, until_s=9),
        ),
        (
            'kind = "partition"\na = "p0"\nb = ["p3", "p2"]\nat_s = 5\none_way = true\n',
            Partition(a=("p0",), b=("p2", "p3"), at_s=5, one_way=True),
        ),
        (
            'kind = "flap"\na = "p0"\nperiod_s = 2\nat_s = 1\nuntil_s = 9\n',
            Flap(a=("p0",), b=("p1", "p2", "p3"), period_s=2, at_s=1, until_s=9),
        ),
        ('kind = "link"\na = "p0"\nb = "p1"\nlink = "home"\n', LinkChange(a=("p0",), b=("p1",), link=HOME, at_s=0)),
        ('kind = "kill"\nwho = "p1"\nat_s = 5\nrestart_s = 9\n', Kill(peer="p1", at_s=5, until_s=9)),
        ('kind = "kill"\nwho = "p1"\nat_s = 5\ndisk = "lost"\n', Kill(peer="p1", at_s=5, disk_lost=True)),
        ('kind = "pause"\nwho = "p1"\nat_s = 5\nresume_s = 9\n', Pause(peer="p1", at_s=5, until_s=9)),
        ('kind = "leave"\nwho = "p1"\nat_s = 5\n', Leaving(peer="p1", at_s=5)),
        ('kind = "fill_disk"\nwho = "p1"\nuntil_s = 9\n', FullDisk(peer="p1", at_s=0, until_s=9)),
        ('kind = "slow_disk"\nwho = "p1"\nmb_per_s = 0.5\n', SlowDisk(peer="p1", mb_per_s=0.5, at_s=0)),
        ('kind = "skew"\nwho = "p1"\nseconds = -30\n', Skew(peer="p1", seconds=-30, at_s=0)),
        ('kind = "byzantine"\nwho = "p1"\nlie = "scale"\nat_s = 7\n', Lie(peer="p1", lie="scale", at_s=7)),
    ],
)
def test_a_table_is_the_fault_that_it_says(table, fault):
    assert faults_of("[[faults]]\n" + table + LINKED) == [fault]


def test_one_table_for_many_peers_is_a_fault_of_each():
    faults = faults_of('[[faults]]\nkind = "kill"\nwho = ["p3", "p0..p1"]\nat_s = 5\n')
    assert faults == [Kill(peer=name, at_s=5) for name in ("p0", "p1", "p3")]


def test_churn_is_drawn_from_the_seed():
    scenario = parse('[[faults]]\nkind = "churn"\nwho = "all"\nmean_up_s = 9\nmean_down_s = 3\nuntil_s = 80\n')
    first, again, other = (scenario.build(seed).faults for seed in (1, 1, 2))
    assert first == again != other
    assert all(isinstance(f, Kill) and f.until_s is not None and f.until_s <= 80 for f in first)


def test_groups_speeds_links_and_starts():
    two = '[[peers]]\ncount = 2\nspeed = [1.0, 0.5]\n[[peers]]\ngroup = "late"\ncount = 2\nlink = "home"\nat_s = 30\n'
    sim = parse('[[faults]]\nkind = "leave"\nwho = "late"\nat_s = 50\n' + LINKED, peers=two).build(0)
    assert [p.speed for p in sim.peers] == [1.0, 0.5, 1.0, 1.0]
    assert sim.faults == [Leaving(peer="p2", at_s=50), Leaving(peer="p3", at_s=50)]
    assert sim.peers[2].host.link == HOME != sim.peers[0].host.link


def test_run_tables_are_over_the_simulators_defaults():
    run = parse("[run.quadratic]\ncondition = 3\n").build(0).run_config
    assert run.quadratic.condition == 3
    assert (run.learner, run.quadratic.dimension) == ("quadratic", 32)


def test_node_tables_reach_the_nodes():
    sim = parse("[peers.node]\nkeep_checkpoints = 5\n").build(0)
    assert {p.config.node.keep_checkpoints for p in sim.peers} == {5}


def test_who_is_meant():
    sim = parse("").build(0)
    groups = {"all": sim.peers, "odd": [sim.peers[1], sim.peers[3]]}

    def names(who):
        return [p.name for p in selected(who, groups)]

    assert names("all") == ["p0", "p1", "p2", "p3"]
    assert names(["odd", "p0", "p1..p1"]) == ["p0", "p1", "p3"]
    for wrong in ("p4", "p2..p1", "p0..p4", "even", "", "others"):
        with pytest.raises(ShoalError, match="expected some of p0..p3, all, odd"):
            names(wrong)


@pytest.mark.parametrize("sides", ['a = "p0..p1"\nb = "p1..p3"', 'a = "all"'])
def test_two_sides_are_two_sides(sides):
    with pytest.raises(ShoalError, match="names the wrong peers"):
        faults_of(f'[[faults]]\nkind = "partition"\n{sides}\nat_s = 1\n')


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[run.sync]\nround_second_max = 3\n",
            "run.sync.round_second_max (line 6): found an unknown key, the nearest known",
        ),
        ("[run.sync]\nround_second_max = 3\n", "round_seconds_max"),
        (
            '[run.sync]\ntarget_samples = "many"\n',
            "run.sync.target_samples (line 6): found 'many', expected a valid integer",
        ),
        (
            "[links.a]\n[links.b]\nlos = 1\n",
            "links.b.los (line 7): found an unknown key, the nearest known one is loss",
        ),
        ("[links.b]\nlatency_ms = [3, 1]\n", "expected 0 <= low <= high"),
        ("[links.b]\nlatency_ms = [3]\n", "expected one, or two"),
        ('[[faults]]\nkind = "klil"\n', "faults[0] (line 5): found kind = 'klil', the nearest known one is kill"),
        ("[[faults]]\nat_s = 3\n", "found no kind"),
        ('[[faults]]\nkind = "kill"\nwho = "p0"\n', "faults[0].at_s (line 5): found nothing, expected this key"),
        ('[[faults]]\nkind = "kill"\nwho = 3\nat_s = 1\n', "faults[0].who (line 7): found 3"),
        ('[[faults]]\nkind = "kill"\nwho = "p0"\nat_s = -1\n', "expected greater than or equal to 0"),
        (
            '[[faults]]\nkind = "kill"\nwho = "p0"\nat_s = 1\nheal_s = 2\n',
            "faults[0].heal_s (line 9): found an unknown key",
        ),
        ('[[faults]]\nkind = "byzantine"\nwho = "p0"\nlie = "white"\n', "expected one of scale, sign_flip"),
        (
            '[[faults]]\nkind = "link"\na = "p0"\nlink = "moon"\n',
            "link = 'moon' is not in [links]; expected one of: none",
        ),
        ("[[peers]]\nspeed = [1.0, 2.0]\n", "2 figures for count = 1"),
        ("[[peers]]\ncount = 5001\n", "peers[1].count (line 6): found 5001"),
        ("[[peers]]\ncount = 4999\n", "5003 peers, expected at most 5000"),
        ("[[peers]]\nspeed = 0.0\n", "between 0.001 and 1000"),
        ("[[peers]]\n[peers.node]\nthreds = 1\n", "peers[1].node.threds (line 7): found an unknown key"),
        (
            "[expect]\nidenticl = true\n",
            "expect.identicl (line 6): found an unknown key, the nearest known one is identical",
        ),
        ("[expect]\nloss_ratio_max = nan\n", "expect.loss_ratio_max"),
        ("[nowhere]\n", "nowhere (line 5): found an unknown key"),
    ],
)
def test_a_mistake_is_named_with_its_place(text, said):
    assert said in mistakes(text)


def test_all_mistakes_at_once():
    assert len(mistakes("[expect]\nx = 1\n[run]\ny = 1\n", peers="").splitlines()) == 3


def test_not_toml():
    assert "is not TOML" in mistakes("= 3")


def test_a_scenario_that_is_not_there(tmp_path):
    with pytest.raises(ShoalError) as caught:
        load_scenario("partition-heel")
    assert caught.value.todo == "Did you mean partition-heal?"
    with pytest.raises(ShoalError, match="cannot be read"):
        load_scenario(str(tmp_path / "none.toml"))


def test_a_file_that_is_no_scenario_is_not_read_whole(tmp_path):
    big = tmp_path / "big.toml"
    big.write_bytes(b"#" * (1024 * 1024 + 1))
    with pytest.raises(ShoalError, match="expected at most 1048576"):
        load_scenario(str(big))
    big.write_bytes(b"\xff")
    with pytest.raises(ShoalError, match="not UTF-8"):
        load_scenario(str(big))


# --- judging ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expect", "changes", "said"),
    [
        ({}, {}, ""),
        ({}, {"identical": False}, "expected one"),
        ({"identical": False}, {"identical": False}, ""),
        ({"rounds_min": 5}, {}, ""),
        ({"rounds_min": 6}, {}, "3 peers behind (p0 at round 5), expected 6"),
        ({"rounds_min": 1}, {"rounds": {}}, "nobody honest runs"),
        ({"running_min": 4}, {}, "3 honest peers run, expected at least 4"),
        ({"loss_ratio_max": 0.1}, {}, ""),
        ({"loss_ratio_max": 0.1}, {"loss_last": 1.0}, "loss went from 2.0 to 1.0"),
        ({"loss_ratio_max": 0.1}, {"loss_last": float("nan")}, "loss went"),
        ({"loss_ratio_max": 0.1}, {"loss_first": None}, "loss went"),
    ],
)
def test_what_was_expected_and_is_not_so_is_said(expect, changes, said):
    unmet = Expect(**expect).unmet(replace(a_report(), **changes))
    assert len(unmet) == bool(said)
    assert said in "".join(unmet)


def test_a_run_cut_short_is_not_asked_for_what_comes_later():
    scenario = parse_scenario(SMALL, "small.toml")
    cut = scenario.play(3, until_s=1.0, replay="again")
    assert cut.unmet == [] and cut.until_s < 3 and cut.rounds["p0"] < 2
    assert (cut.replay, cut.scenario) == ("again", "small")


# --- the library and the command --------------------------------------------------------------------------------------


def test_the_library_is_there_and_every_fault_names_somebody():
    assert set(library()) >= {
        "lan",
        "wan",
        "home-uplinks",
        "flaky-wifi",
        "churn",
        "partition-heal",
        "mass-restart",
        "byzantine-third",
        "slow-tail",
        "flash-crowd",
    }
    for name in library():
        scenario = load_scenario(name)
        assert scenario.title == name and scenario.about
        last = [f.until_s or f.at_s for f in scenario.build(0).faults]
        assert all(at < scenario.until_s for at in last)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(library()))
def test_a_shipped_scenario_comes_out_as_it_says(name):
    report = load_scenario(name).play(7)
    assert report.ok, report.describe()


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return str(path)


def last_json(text: str) -> dict:
    return json.loads(text.splitlines()[-1])


def test_same_seed_same_trace_and_a_command_that_replays_it(small, capsys, tmp_path):
    assert shoal(["sim", small, "--seed", "5", "--json", "--report", str(tmp_path / "r")]) == ExitCode.OK
    first = last_json(capsys.readouterr().out)
    assert (tmp_path / "r" / "report.html").exists()
    assert first["ok"] and first["identical"] and first["rounds"] == {"p0": 2, "p1": 2}
    command = first["replay"].split()
    assert command[0] == "shoal"
    assert shoal([*command[1:], "--json"]) == ExitCode.OK
    assert last_json(capsys.readouterr().out)["trace_hash"] == first["trace_hash"]


def test_many_seeds_and_those_that_failed(small, capsys, tmp_path):
    assert shoal(["sim", small, "--seeds", "1..2", "--json", "--report", str(tmp_path)]) == ExitCode.OK
    found = last_json(capsys.readouterr().out)
    assert found["failed"] == [] and [r["seed"] for r in found["runs"]] == [1, 2]
    assert found["runs"][0]["trace_hash"] != found["runs"][1]["trace_hash"]
    assert (tmp_path / "seed-2" / "report.json").exists()


def test_what_did_not_come_true_is_exit_code_1(tmp_path, capsys):
    path = tmp_path / "hard.toml"
    path.write_text(SMALL.replace("rounds_min = 2", "rounds_min = 3"))
    assert shoal(["sim", str(path)]) == ExitCode.FAILED
    assert "UNMET      2 peers behind" in capsys.readouterr().out
    assert shoal(["sim", str(path), "--seeds", "4..4"]) == ExitCode.FAILED
    assert "0 of 1 seeds ok; failed: [4]" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [[], ["lan", "--seed", "1", "--seeds", "1..2"], ["lan", "--seeds", "2..1"], ["lan", "--seeds", "0..999999"]],
)
def test_usage(arguments, capsys):
    assert shoal(["sim", *arguments]) == ExitCode.USAGE
    assert "expected" in capsys.readouterr().err


def test_the_list(capsys):
    assert shoal(["sim", "--list"]) == ExitCode.OK
    assert "partition-heal" in capsys.readouterr().out
    assert shoal(["sim", "--list", "--json"]) == ExitCode.OK
    assert {s["name"] for s in last_json(capsys.readouterr().out)["scenarios"]} == set(library())


def test_a_name_that_is_none_is_an_error_in_three_parts(capsys):
    assert shoal(["sim", "lann"]) == ExitCode.CONFIG
    assert "Did you mean lan?" in capsys.readouterr().err
