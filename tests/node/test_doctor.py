"""`shoal doctor`: each check sees what it is for, says what to do, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from shoal.node import doctor
from shoal.node.doctor import Finding, describe, examine
from shoal.node.observe.control import ControlServer


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_good_machine(tmp_path, free_port):
    data_dir = tmp_path / "not" / "yet"
    found = by_name(examine(data_dir, free_port))
    assert not [f for f in found.values() if f.status == "bad"]
    assert {"python", "device", "clock", "disk", "write", "identity", "port IPv4", "reachable", "hivemind"} <= set(
        found
    )
    assert found["identity"].status == "note"
    assert os.listdir(tmp_path) == []


def test_every_finding_that_is_not_good_or_a_fact_says_what_to_do(tmp_path, free_port):
    for finding in examine(tmp_path, free_port):
        assert finding.todo or finding.status == "good" or finding.name == "identity", finding


def test_a_taken_port(tmp_path):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finding = by_name(examine(tmp_path, port))["port IPv4"]
    assert finding.status == "bad" and str(port) in finding.todo


def test_the_port_of_the_running_node_is_no_trouble(tmp_path):
    async def story():
        async def status(params):
            return {"addresses": ["127.0.0.1:4711"]}

        server = ControlServer(tmp_path / "control.sock", {"status": status}, lambda error: None)
        await server.start()
        try:
            return await asyncio.to_thread(doctor._port, 4711, tmp_path)
        finally:
            await server.close()

    (finding,) = asyncio.run(story())
    assert finding.status == "good" and "running node" in finding.detail


def test_an_identity_that_others_can_read(tmp_path):
    (tmp_path / "identity").write_bytes(b"")
    (tmp_path / "identity").chmod(0o644)
    (finding,) = doctor._identity(tmp_path)
    assert finding.status == "bad" and "0644" in finding.detail and "chmod 600" in finding.todo
    (tmp_path / "identity").chmod(0o600)
    assert doctor._identity(tmp_path)[0].status == "good"


def test_a_full_disk(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1024})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: usage)
    disk = by_name(doctor._disk(tmp_path))["disk"]
    assert disk.status == "bad" and disk.todo


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.os, "open", refuse)
    assert by_name(doctor._disk(tmp_path))["write"].status == "bad"


def test_a_clock_that_was_never_set():
    assert doctor._clock(0.0).status == "note" and doctor._clock(2e9).status == "good"


@pytest.mark.parametrize(("address", "status"), [("10.0.0.5", "note"), ("8.8.8.8", "good"), ("2a00::5", "good")])
def test_private_addresses_are_told_from_public_ones(monkeypatch, address, status):
    monkeypatch.setattr(doctor, "interface_addresses", lambda: [address])
    (finding,) = doctor._addresses(7447)
    assert finding.status == status and "7447" in finding.detail
    assert bool(finding.todo) == (status == "note")


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert "shoal[dht]" in by_name(doctor._extras())["hivemind"].todo


def test_description():
    text = describe([Finding("disk", "bad", "1 KiB", "Free some."), Finding("python", "good", "3.11")])
    assert text.splitlines() == ["BAD  disk       1 KiB", "                Free some.", "ok   python     3.11"]
