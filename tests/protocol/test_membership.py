"""Membership in virtual time: deaths are noticed, the living are left alone, old and forged news does nothing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol import limits, membership_table
from shoal.protocol import membership as m
from shoal.protocol.membership import PRESETS, Kind, Membership, Message, Record, State
from shoal.protocol.wire_pb2 import Summary

from .membership_net import LOCAL, Net, report, sign, word

ALIVE, SUSPECT, DEAD, LEFT = State


def sends(actions: list[m.Action], kind: Kind | None = None) -> list[m.Send]:
    return [a for a in actions if isinstance(a, m.Send) and kind in (None, a.message.kind)]


def changed(actions: list[m.Action]) -> list[tuple[str, State | None, State]]:
    return [(a.peer, a.old, a.new) for a in actions if isinstance(a, m.Changed)]


class One:
    """One machine, "me", driven by hand."""

    def __init__(self, seed: int = 1, **changes: float) -> None:
        me = Record("me", ALIVE, 1, 1, b"m" * 16, ("me:1",))
        self.now = 0.0
        self.machine = Membership(me, replace(LOCAL, **changes), random.Random(seed), sign)

    def do(self, event: m.Event) -> list[m.Action]:
        return self.machine.handle(self.now, event)

    def hear(self, peer: str, *rumours: Record, kind: Kind = Kind.SYNC_REPLY, **more: object) -> list[m.Action]:
        return self.do(m.Received(peer, Message(kind, rumours=rumours, **more)))  # type: ignore[arg-type]

    def tick(self, seconds: float) -> list[m.Action]:
        """Ticks on time for so long."""
        actions: list[m.Action] = []
        for _ in range(round(seconds / LOCAL.tick_s)):
            self.now += LOCAL.tick_s
            actions += self.do(m.Tick())
        return actions

    def state(self, peer: str) -> State | None:
        return self.machine.state(peer)


# --- a swarm in virtual time ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7])
def test_a_killed_peer_is_known_to_be_dead_within_seconds(n: int) -> None:
    times = []
    for seed in range(10):
        net = Net(n, seed=seed)
        assert net.whole()
        net.kill("p0")
        times.append(net.until(lambda net=net: net.all_see("p0", DEAD), 6))
        assert {c.peer for _, _, c in net.changes if c.new in (SUSPECT, DEAD)} == {"p0"}
    assert sum(times) / len(times) < 3.2, times


@pytest.mark.parametrize("n", [3, 7])
@pytest.mark.parametrize("loss", [0.0, 0.05, 0.2])
def test_nobody_alive_is_declared_dead_under_loss(n: int, loss: float) -> None:
    for seed in range(3):
        net = Net(n, seed=seed)
        net.loss = loss
        net.run(60)
        assert net.count(DEAD) == 0
        if not loss:
            assert net.count(SUSPECT) == 0


@pytest.mark.parametrize("n", [3, 7])
def test_nobody_is_declared_dead_while_all_cores_are_busy(n: int) -> None:
    """Half of all ticks and messages come up to 0.3 s late, some up to 0.9 s, and everybody stops for up to 1 s at times."""
    for seed in range(3):
        net = Net(n, seed=seed)
        rng = random.Random(seed)

        def busy(rng: random.Random = rng) -> float:
            x = rng.random()
            return rng.uniform(0, 0.3) if x < 0.5 else rng.uniform(0.3, 0.9) if x < 0.55 else 0.0

        net.stall = busy
        for _ in range(12):
            net.run(5)
            net.freeze(rng.choice(sorted(net.nodes)), rng.uniform(0.3, 1.0))
        assert net.count(DEAD) == 0
        # and it is still noticed when somebody dies
        net.kill("p0")
        net.until(lambda net=net: net.all_see("p0", DEAD), 20)


def test_a_frozen_peer_is_dead_for_others_blames_nobody_and_comes_back() -> None:
    net = Net(5, seed=3)
    net.freeze("p2", 20)
    net.until(lambda: net.all_see("p2", DEAD), 6)
    net.run(net.nodes["p2"].frozen_until - net.now)
    net.until(net.whole, 6)
    assert not [c for _, who, c in net.changes if who == "p2" and c.new in (SUSPECT, DEAD)]
    assert net.nodes["p2"].machine.me.counter > 1  # it refuted
    assert [h for who, h in net.heard if h.peer == "p2" and "back" in h.reason]  # dial it afresh


def test_all_frozen_at_once_blame_nobody() -> None:
    """A laptop that was closed: every process wakes at about the same time."""
    net = Net(4, seed=4)
    for peer in net.nodes:
        net.freeze(peer, 300 + net.rng.uniform(0, 0.2))
    net.run(310)
    assert net.whole() and net.count(DEAD) == 0


@pytest.mark.parametrize(("preset", "n"), [("local", 6), ("lan", 7), ("local", 20)])
def test_a_partition_heals_and_kills_nobody_on_ones_own_side(preset: str, n: int) -> None:
    """At healing each side hears that the other holds its members dead: they are asked before it is believed."""
    for seed in range(2):
        net = Net(n, PRESETS[preset], seed=seed)
        left, right = sorted(net.nodes)[: n // 2], sorted(net.nodes)[n // 2 :]
        net.until(net.whole, 60)
        net.partition(left, right)
        apart = [(a, b) for one, other in ((left, right), (right, left)) for a in one for b in other]
        net.until(lambda net=net, apart=apart: all(net.state(a, b) is DEAD for a, b in apart), 120)
        assert all(net.state(a, b) is ALIVE for side in (left, right) for a in side for b in side if a != b)
        net.changes.clear()
        net.cut.clear()
        net.until(net.whole, 20)
        assert net.count(DEAD) == 0


def test_ten_minutes_apart_heal_as_fast() -> None:
    net = Net(4, seed=5)
    net.partition(["p0", "p1"], ["p2", "p3"])
    net.run(600)
    net.cut.clear()
    net.until(net.whole, 10)


def test_a_one_way_cut_to_one_peer_is_bridged_by_helpers() -> None:
    net = Net(4, seed=6)
    net.cut = {("p0", "p1")}
    net.run(60)
    assert net.count(DEAD) == 0


def test_everything_is_killed_and_comes_back() -> None:
    net = Net(5, seed=7)
    for peer in list(net.nodes):
        net.kill(peer)
    for peer in ("p0", "p1", "p2", "p3", "p4"):
        net.start(peer)
    for peer in ("p1", "p2", "p3"):
        net.introduce(peer, "p0")
    net.introduce("p4", "p3")
    net.until(net.whole, 10)


@pytest.mark.parametrize("noticed", [True, False])
def test_a_restarted_process_outranks_what_is_known_of_its_last_one(noticed: bool) -> None:
    net = Net(4, seed=8)
    net.do("p1", m.SetMe(samples_per_s=5.0))  # so its counter is above that of a new process
    net.run(2)
    net.kill("p1")
    if noticed:
        net.until(lambda: net.all_see("p1", DEAD), 6)
    net.start("p1", at="elsewhere:9")  # the same life, a new boot id, another place
    net.introduce("p1", "p3")
    net.until(net.whole, 6)
    net.run(3)
    boot = b"%016d" % net.nodes["p1"].boot
    for observer in ("p0", "p2", "p3"):
        view = net.nodes[observer].machine.members()["p1"]
        assert (view.addresses, view.boot_id, view.incarnation) == (("elsewhere:9",), boot, 1)
    assert net.count(DEAD, of="p1") == (3 if noticed else 0)


def test_a_new_life_outranks_the_old_one() -> None:
    net = Net(3, seed=9)
    net.kill("p1")
    net.start("p1", life=2)
    net.introduce("p1", "p0")
    net.until(lambda: all(net.nodes[p].machine.members()["p1"].incarnation == 2 for p in ("p0", "p2")), 6)
    net.do("p1", m.SetMe(incarnation=3, addresses=("moved:1",)))
    net.run(3)
    assert net.nodes["p2"].machine.members()["p1"].incarnation == 3
    assert net.nodes["p0"].machine.members()["p1"].addresses == ("moved:1",)


def test_a_goodbye_is_known_to_all_at_once_and_is_no_death() -> None:
    net = Net(12, seed=10)
    net.do("p4", m.Leave())
    assert net.do("p4", m.Leave()) == []
    net.run(0.5)
    net.kill("p4")
    net.until(lambda: net.all_see("p4", LEFT), 3)
    net.run(20)
    assert net.count(SUSPECT, of="p4") == net.count(DEAD, of="p4") == 0
    assert all("p4" in node.machine.dead() for node in net.nodes.values())
    net.start("p4")
    net.introduce("p4", "p0")
    net.until(net.whole, 6)


def test_a_newcomer_is_introduced_in_spite_of_loss() -> None:
    for seed in range(5):
        net = Net(6, seed=seed)
        net.loss = 0.3
        net.start("p9")
        net.introduce("p9", "p2")
        net.until(lambda net=net: len(net.nodes["p9"].machine.alive()) == 6, 20)


def test_speed_reaches_everybody() -> None:
    net = Net(7, seed=11)
    net.do("p3", m.SetMe(samples_per_s=12.5))
    net.run(4)
    assert all(n.machine.members()["p3"].samples_per_s == 12.5 for p, n in net.nodes.items() if p != "p3")


def test_a_table_larger_than_a_message_is_exchanged_in_pages() -> None:
    net = Net(1, PRESETS["lan"], meet=False)
    names = [f"x{i:03}" for i in range(200)]
    net.do("p0", m.Received("x000", Message(Kind.SYNC_REPLY, rumours=tuple(word(n) for n in names[:64]))))
    for start in range(64, 200, 64):
        rumours = tuple(word(n) for n in names[start : start + 64])
        net.do("p0", m.Received("x000", Message(Kind.SYNC_REPLY, rumours=rumours)))
    net.start("new")
    net.introduce("new", "p0")
    net.run(1.0)
    assert net.nodes["new"].machine.alive() >= set(names) | {"p0"}
    assert net.largest <= limits.RUMOURS_PER_MESSAGE_MAX


def test_same_seed_same_trace() -> None:
    def trace() -> list[tuple[float, str, m.Changed]]:
        net = Net(5, seed=12)
        net.loss = 0.1
        net.run(10)
        net.kill("p1")
        net.run(10)
        return net.changes

    assert trace() == trace()


def test_traffic_per_peer_does_not_grow_with_the_swarm() -> None:
    """Two messages per probe at both ends, plus tables now and then."""
    rates = {}
    for n in (4, 16):
        net = Net(n, seed=13)
        net.run(20)
        before = net.sent
        net.run(20)
        rates[n] = (net.sent - before) / 20 / n
    assert rates[16] < 1.3 * rates[4] < 1.3 * 3 / LOCAL.probe_interval_s


# --- words and reports, one machine -----------------------------------------------------------------------------------


def test_old_words_neither_kill_nor_revive() -> None:
    one = One()
    one.hear("a", word("a", 5))
    assert one.state("a") is ALIVE
    one.hear("b", word("b"), report("a", "b", 4, state=DEAD), report("a", "b", 4), word("a", 4, state=LEFT))
    assert one.state("a") is ALIVE
    one.hear("a", word("a", 6, state=LEFT))
    assert changed(one.hear("b", word("a", 5), word("a", 6))) == [] and one.state("a") is LEFT
    one.hear("b", report("a", "b", 6, state=DEAD))
    assert one.state("a") is LEFT
    assert changed(one.hear("b", word("a", 7))) == [("a", LEFT, ALIVE)]
    one.hear("b", word("a", 1, life=0))
    assert one.machine.members()["a"].counter == 7
    one.hear("b", word("a", 1, life=2))  # a new life needs no higher counter
    view = one.machine.member("a")
    assert view is not None and (view.incarnation, view.counter) == (2, 1)


def test_reports_on_words_that_nobody_has_seen_do_nothing() -> None:
    """A liar with a huge counter can neither bury a peer for good nor drive its counter to the end of the range."""
    one = One()
    one.hear("a", word("a"))
    one.hear("b", word("b"), report("a", "b", limits.INT64_MAX, state=DEAD), report("a", "b", 1, life=9, state=DEAD))
    one.hear("b", report("stranger", "b", state=DEAD), report("me", "b", limits.INT64_MAX, state=DEAD))
    one.hear("b", report("me", "b", 1, life=7, state=DEAD))
    assert one.state("a") is ALIVE and one.state("stranger") is None and one.machine.me.counter == 1


def test_one_declaration_of_death_is_a_suspicion_with_the_least_timeout() -> None:
    one = One()
    for peer in "abcde":
        one.hear(peer, word(peer))
    actions = one.hear("b", report("a", "b", state=DEAD))
    assert changed(actions) == [("a", ALIVE, SUSPECT)] and one.machine.alive() == set("abcde")
    assert one.state("a") is SUSPECT
    one.hear("a", word("a", 2))
    assert one.state("a") is ALIVE


def test_a_suspect_dies_by_our_own_clock_and_its_newer_word_revives_it() -> None:
    one = One(probe_interval_s=100, suspicion_mult=0.012)  # no probes; least timeout 1.2 s
    for peer in "abcd":
        one.hear(peer, word(peer))
    one.tick(0.1)
    one.hear("b", report("a", "b"))
    assert not [c for c in changed(one.tick(1.1)) if c[0] == "a"]
    one.hear("b", report("a", "b", state=DEAD))
    actions = one.tick(0.2)
    assert ("a", SUSPECT, DEAD) in changed(actions)
    (reason,) = [a.reason for a in actions if isinstance(a, m.Changed)]
    assert "without refutation" in reason and "1 reporters" in reason
    assert one.machine.dead() == {"a"}
    actions = one.hear("a", word("a", 2))
    assert changed(actions) == [("a", DEAD, ALIVE)]
    assert [a for a in actions if isinstance(a, m.Heard)][0].addresses == ("a:1",)
    assert any("back" in s.reason for s in sends(actions, Kind.SYNC))


def test_whoever_speaks_is_not_dead() -> None:
    one = One(probe_interval_s=100, suspicion_mult=0.012)
    one.hear("a", word("a"))
    one.hear("b", word("b"))
    one.hear("b", report("a", "b"))
    for _ in range(10):
        one.tick(1.0)
        one.hear("a", kind=Kind.PING)
    assert one.state("a") is SUSPECT
    one.tick(2.0)
    assert one.state("a") is DEAD


def test_strangers_names_do_not_shorten_a_suspicion() -> None:
    one = One(probe_interval_s=100, suspicion_mult=0.012, suspicion_max_mult=10, tick_s=0.1)
    for peer in "abcde":
        one.hear(peer, word(peer))
    one.tick(0.1)
    one.hear("b", report("a", "b"), report("a", "x"), report("a", "y", state=DEAD), report("a", "z"))
    one.tick(6.0)
    assert one.state("a") is SUSPECT
    one.hear("b", report("a", "c"), report("a", "d"), report("a", "e"))
    one.tick(0.1)
    assert one.state("a") is DEAD


def test_nobody_is_buried_before_it_was_asked() -> None:
    """In a large swarm not everybody asks at once; who did not asks at the end of the timeout, and waits for the answer."""
    for seed in range(8):
        one = One(seed, probe_interval_s=100, suspicion_mult=0.001, sync_interval_s=1000.0)
        one.tick(0.1)
        names = [f"x{i:03}" for i in range(200)]
        one.hear("x000", *(word(n) for n in names))
        accusation = report("x001", "x000", state=DEAD)
        at_once = sends(one.hear("x000", accusation), Kind.PING)
        asked = [s for s in at_once + sends(one.tick(0.4), Kind.PING) if s.to == "x001"]
        assert len(asked) == 1 and accusation in asked[0].message.rumours
        if not at_once:
            assert one.state("x001") is SUSPECT
            one.tick(0.7)
            assert one.state("x001") is DEAD
            return
    pytest.fail("everybody asked at once")


def test_history_told_to_a_newcomer_is_no_accusation() -> None:
    one = One()
    actions = one.hear("b", word("b"), word("a", 3), report("a", "b", 3, state=DEAD))
    assert one.state("a") is DEAD and ("a", ALIVE, DEAD) in changed(actions)


def test_old_news_is_answered_with_the_newer_word() -> None:
    one = One()
    one.hear("a", word("a", 5))
    one.do(m.SetMe(samples_per_s=1.0))
    mine = one.machine.me
    for news in (report("a", "b", 2), word("a", 4)):
        (reply,) = sends(one.hear("b", word("b"), news))
        assert word("a", 5) in reply.message.rumours
    for news in (report("me", "b", 1), word("me", 1)):
        (reply,) = sends(one.hear("b", news))
        assert mine in reply.message.rumours and one.machine.me == mine
    assert sends(one.hear("b", mine)) == []  # our own word, come back
    (ack,) = sends(one.hear("b", report("a", "b", 2), kind=Kind.PING, nonce=9))
    assert ack.message.kind is Kind.ACK and ack.message.nonce == 9 and word("a", 5) in ack.message.rumours
    many = [word(f"x{i}", 2) for i in range(40)]
    one.hear("b", *many)
    (reply,) = sends(one.hear("b", *(word(f"x{i}", 1) for i in range(40))))
    assert 8 <= len(reply.message.rumours) <= limits.RUMOURS_PER_MESSAGE_MAX


def test_refutation_rides_on_the_very_answer_and_costs_health() -> None:
    one = One()
    one.hear("b", word("b"))
    (ack,) = sends(one.hear("b", report("me", "b"), kind=Kind.PING))
    assert ack.message.rumours[0] == one.machine.me and one.machine.me.counter == 2
    assert one.machine.awareness.score == 1
    assert one.machine.me.signed == sign(one.machine.me).signed


def test_words_of_an_earlier_process_are_outranked() -> None:
    for said in (
        word("me", 7, boot_id=b"old"),
        word("me", 1, boot_id=b"old"),
        word("me", 7, state=LEFT, boot_id=b"old"),
    ):
        one = One()
        one.hear("b", word("b"), said)
        assert one.machine.me.counter == said.counter + 1 and one.machine.awareness.score == 0
    one.hear("b", word("me", 1, life=2))  # a later life is the handshake's business
    assert one.machine.me.incarnation == 1


def test_who_left_refutes_nothing_and_answers_with_its_goodbye() -> None:
    one = One()
    one.hear("b", word("b"))
    goodbyes = sends(one.do(m.Leave()))
    assert [g.to for g in goodbyes] == ["b"] and goodbyes[0].message.rumours[0].state is LEFT
    assert sends(one.tick(5)) == []
    (ack,) = sends(one.hear("b", report("me", "b", 2), word("me", 9), kind=Kind.PING))
    assert ack.message.rumours[0].state is LEFT and one.machine.me.counter == 2
    assert not sends(one.hear("stranger", kind=Kind.ACK))


def test_a_peer_that_is_not_known_is_asked_who_it_is() -> None:
    one = One()
    greeting = sends(one.hear("x", kind=Kind.PING), Kind.SYNC)
    assert greeting[0].to == "x" and one.machine.me in greeting[0].message.rumours
    assert sends(one.hear("x", kind=Kind.SYNC_REPLY)) == []
    assert not sends(one.hear("x", kind=Kind.SYNC), Kind.SYNC)  # or two full tables would ask each other for ever


def test_expected_peers_are_probed_may_die_and_become_members_by_their_own_word() -> None:
    one = One()
    one.hear("b", word("b"))
    actions = one.do(m.Expected(("me", "b", "ghost")))
    assert changed(actions) == [("ghost", None, ALIVE)] and one.do(m.Expected(("ghost",))) == []
    one.hear("b", report("ghost", "b", 0, 0, state=DEAD))
    assert one.state("ghost") is ALIVE  # nobody's report counts on what has not been signed
    told = []
    for _ in range(40):
        for send in sends(one.tick(0.1)):
            told += send.message.rumours
            if send.to == "b" and send.message.kind is Kind.PING:
                one.hear("b", kind=Kind.ACK, nonce=send.message.nonce)
    assert one.state("ghost") is DEAD and not [r for r in told if r.peer == "ghost"]
    assert sends(one.hear("ghost", kind=Kind.PING), Kind.SYNC)
    one.hear("ghost", word("ghost"))
    assert one.state("ghost") is ALIVE


# --- probes, relays, tables, by hand ----------------------------------------------------------------------------------


def test_probe_then_helpers_then_suspicion_and_missing_nacks_cost_health() -> None:
    one = One()
    for peer in "abcd":
        one.hear(peer, word(peer))
    (ping,) = sends(one.tick(0.1), Kind.PING)
    target = ping.to
    asked = sends(one.tick(0.3), Kind.PING_REQ)
    assert len(asked) == 3 and {a.message.target for a in asked} == {target} and target not in {a.to for a in asked}
    helper = asked[0].to
    for peer in (helper, helper, target, "x"):  # counts once, and only who was asked
        one.hear(peer, kind=Kind.NACK, nonce=asked[0].message.nonce, target=target)
    actions = one.tick(0.2)
    assert (target, ALIVE, SUSPECT) in changed(actions)
    assert one.machine.awareness.score == 2  # three asked, one nack


@pytest.mark.parametrize("direct", [True, False])
def test_an_ack_ends_a_probe_and_mends_health(direct: bool) -> None:
    one = One()
    for peer in "ab":
        one.hear(peer, word(peer))
    one.machine.awareness.change(+2)
    (ping,) = sends(one.tick(0.1), Kind.PING)
    if not direct:
        one.tick(0.8)
    one.hear("stranger", kind=Kind.ACK, nonce=ping.message.nonce)
    assert one.machine.awareness.score == 2
    one.hear(ping.to if direct else ({"a", "b"} - {ping.to}).pop(), kind=Kind.ACK, nonce=ping.message.nonce)
    assert one.machine.awareness.score == 1
    one.hear(ping.to, kind=Kind.ACK, nonce=ping.message.nonce)
    one.hear(ping.to, kind=Kind.NACK, nonce=ping.message.nonce)
    assert one.machine.awareness.score == 1 and one.state(ping.to) is ALIVE


def test_alone_with_nobody_to_ask_a_failed_probe_costs_health() -> None:
    one = One()
    one.hear("a", word("a"))
    one.tick(0.1 + 2 * LOCAL.probe_timeout_s + 0.2)
    assert one.state("a") is SUSPECT and one.machine.awareness.score == 1


def test_pings_for_others() -> None:
    one = One(probe_interval_s=100)
    one.tick(0.1)
    for peer in "ab":
        one.hear(peer, word(peer))
    (ping,) = sends(one.hear("a", kind=Kind.PING_REQ, nonce=5, target="b"))
    assert ping.to == "b" and ping.message.kind is Kind.PING
    (nack,) = sends(one.tick(0.3), Kind.NACK)
    assert (nack.to, nack.message.nonce, nack.message.target) == ("a", 5, "b")
    (ack,) = sends(one.hear("b", kind=Kind.ACK, nonce=ping.message.nonce))
    assert (ack.to, ack.message.kind, ack.message.nonce) == ("a", Kind.ACK, 5)  # late is better than never
    (nack,) = sends(one.hear("a", kind=Kind.PING_REQ, nonce=6, target="nobody"))
    assert nack.message.kind is Kind.NACK
    flood = [sends(one.hear("a", kind=Kind.PING_REQ, nonce=n, target="b"))[0].message.kind for n in range(20)]
    assert flood.count(Kind.PING) == 8 and flood.count(Kind.NACK) == 12


def test_a_late_tick_counts_for_nobody() -> None:
    one = One()
    for peer in "abc":
        one.hear(peer, word(peer))
    one.tick(0.1)
    one.hear("b", report("a", "b"))
    one.now += 0.45  # a short stop: everything is that much later
    assert not changed(one.do(m.Tick())) and one.machine.awareness.score == 0
    one.now += 60  # a long one: the probe is dropped, suspicions start over, and our own health is doubted
    assert not changed(one.do(m.Tick())) and one.machine.awareness.score == 1
    assert one.machine._probe is None
    assert not [c for c in changed(one.tick(1.1)) if c[2] is DEAD]


def test_whole_tables_are_sent_once_in_a_while_to_who_asks() -> None:
    one = One()
    one.hear("a", word("a"))
    one.hear("a", *(word(f"x{i:02}") for i in range(30)))
    assert len(sends(one.hear("a", kind=Kind.SYNC))[0].message.rumours) == 32
    (short,) = sends(one.hear("a", kind=Kind.SYNC))
    assert {r.peer for r in short.message.rumours} == {"me", "a"}
    assert {r.peer for r in sends(one.hear("stranger", kind=Kind.SYNC))[0].message.rumours} == {"me"}
    one.now += 1.5
    assert len(sends(one.hear("a", kind=Kind.SYNC))[0].message.rumours) == 32


def test_first_contacts_are_repeated_until_they_are_answered() -> None:
    one = One()
    assert len(sends(one.do(m.Introduced("a")), Kind.SYNC)) == 1
    assert len(sends(one.tick(10), Kind.SYNC)) == 4
    one.do(m.Introduced("b"))
    one.hear("b", word("b"))
    assert not [s for s in sends(one.tick(2), Kind.SYNC) if "first" in s.reason]
    for i in range(100):
        one.do(m.Introduced(f"y{i}"))
    assert len(one.machine._introducing) == limits.INTRODUCTIONS_MAX


def test_dead_members_are_dialled_now_and_then() -> None:
    one = One(probe_interval_s=100)
    one.hear("b", word("b"), word("a"), report("a", "b", state=DEAD))
    greetings = [s for s in sends(one.tick(10), Kind.SYNC) if s.to == "a"]
    assert len(greetings) == 5
    assert {report("a", "b", state=DEAD), word("a"), one.machine.me} <= set(greetings[0].message.rumours)


def test_summaries_are_kept_with_their_time() -> None:
    one = One()
    one.hear("stranger", kind=Kind.PING, summary=Summary(round=1))
    one.hear("a", word("a"), summary=Summary(round=2))
    one.now = 4.0
    one.hear("a", summary=Summary(round=3))
    one.hear("a")
    view = one.machine.members()["a"]
    assert view.summary == Summary(round=3) and view.summary_at == 4.0 and view.since == 0.0
    assert one.machine.member("stranger") is None


def test_the_table_is_bounded_and_who_is_gone_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_table.limits, "MEMBERS_MAX", 4)
    one = One()
    for index, peer in enumerate("abcd"):
        one.now = float(index)
        one.hear(peer, word(peer))
    one.hear("e", word("e"))
    one.do(m.Expected(("f",)))
    assert sorted(one.machine.members()) == list("abcd")
    one.hear("c", word("c", 2, state=LEFT))
    one.now += 1
    one.hear("a", word("a", 2, state=LEFT))
    one.hear("e", word("e"))
    assert sorted(one.machine.members()) == list("abde")
    told = {r.peer for _ in range(20) for s in sends(one.hear("b", kind=Kind.PING)) for r in s.message.rumours}
    assert "c" not in told and "e" in told
    one.do(m.Expected(("f",)))
    assert sorted(one.machine.members()) == list("bdef") and one.machine.dead() == set()


RECORDS = st.builds(
    lambda peer, state, counter, life, reporter: (
        word(peer, counter, life, state) if state in (ALIVE, LEFT) else report(peer, reporter, counter, life, state)
    ),
    st.sampled_from(["me", *"abcde"]),
    st.sampled_from(State),
    st.integers(1, 4),
    st.integers(1, 2),
    st.sampled_from([*"abcdexyz"]),
)
EVENTS = st.one_of(
    st.just(m.Tick()),
    st.builds(m.Introduced, st.sampled_from("abcxy")),
    st.builds(lambda p: m.Expected(tuple(p)), st.lists(st.sampled_from("abcxy"), max_size=3)),
    st.builds(
        lambda peer, kind, nonce, target, rumours: m.Received(peer, Message(kind, nonce, target, tuple(rumours))),
        st.sampled_from("abcxyz"),
        st.sampled_from(Kind),
        st.integers(0, 3),
        st.sampled_from(["", "me", *"abcx"]),
        st.lists(RECORDS, max_size=6),
    ),
)


@given(st.lists(st.tuples(st.floats(0, 3), EVENTS), max_size=40), st.integers(0, 3))
def test_whatever_comes_the_laws_hold(events: list[tuple[float, m.Event]], seed: int) -> None:
    """Words are monotone, ours outranks what was heard of us, sets agree with states, messages keep their limit."""
    one = One(seed)
    ranks: dict[str, tuple[int, int, int]] = {}
    for wait, event in events:
        one.now += wait
        before = one.machine.me.rank
        actions = one.do(event)
        assert one.machine.me.rank >= before and one.machine.me.state is ALIVE
        for send in sends(actions):
            assert len(send.message.rumours) <= limits.RUMOURS_PER_MESSAGE_MAX
            assert all(r.signed for r in send.message.rumours) and send.to != "me"
        views = one.machine.members()
        assert "me" not in views
        for peer, view in views.items():
            rank = (view.incarnation, view.counter, int(view.state is LEFT))
            assert rank >= ranks.get(peer, rank)
            ranks[peer] = rank
            assert (peer in one.machine.alive()) == (view.state in (ALIVE, SUSPECT))
            assert (peer in one.machine.dead()) == (view.state in (DEAD, LEFT))


# --- driven by `due` --------------------------------------------------------------------------------------------------


def test_a_driver_that_sleeps_until_it_is_due_finds_a_death_as_one_that_always_ticks() -> None:
    def death(sleeps: bool) -> list[tuple[State | None, State]]:
        one, events = One(), []
        one.hear("a", word("a"))
        end = one.now + 60.0
        ticks = 0
        while one.now < end:
            events += changed(one.do(m.Tick()))
            ticks += 1
            one.now = one.machine.due() if sleeps else one.now + LOCAL.tick_s
        if sleeps:
            assert ticks < 60 / LOCAL.tick_s
        return [(old, new) for _, old, new in events]

    assert death(True) == death(False) == [(ALIVE, SUSPECT), (SUSPECT, DEAD)]


def test_a_tick_later_than_asked_for_is_a_stop_and_an_event_in_between_does_not_hide_it() -> None:
    one = One()
    one.hear("a", word("a"))
    while not sends(one.do(m.Tick()), Kind.PING):
        one.now = one.machine.due()
    one.now = one.machine.due() + 30.0
    one.hear("b", word("b"))
    one.machine.due()
    assert not changed(one.do(m.Tick()))
    assert one.machine.awareness.score == 1


def test_only_neighbours_and_a_few_strays_are_probed_in_a_large_swarm() -> None:
    one = One()
    for start in range(0, 300, 50):
        one.hear("p0", *(word(f"p{i}") for i in range(start, start + 50)))
    near, probed = one.machine.neighbours(), []
    assert 8 < len(near) < 64
    for _ in range(4000):
        one.now += LOCAL.tick_s
        for send in sends(one.do(m.Tick()), Kind.PING):
            if send.reason == "its turn":
                probed.append(send.to)
                one.hear(send.to, kind=Kind.ACK, nonce=send.message.nonce)
    strays = [peer for peer in probed if peer not in near]
    assert near <= set(probed)
    assert 0 < len(strays) < len(probed) / 8
