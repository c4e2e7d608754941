"""Direct mode: the contract with Ray Serve's HAProxy, which is internal there. A change by an upgrade must fail these tests.

tests/system/test_fleet.py shows that it works with real processes.
"""

from __future__ import annotations

import asyncio
import json
import re
import warnings
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, when it is imported
    pytest.importorskip("ray.serve")
    from ray.serve import Application
    from ray.serve.request_router import RequestRouter

    from headstart.fleet.cluster import application, booked, direct, fronting, launch
    from headstart.fleet.cluster.setup import FleetSetup

from headstart.config import Settings
from headstart.fleet.model_card import ModelCard
from headstart.fleet.router.reports import ReplicaReport
from headstart.testing.fake_engine import FakeEngine

pytestmark = pytest.mark.slow  # Ray is an extra of the slow tests


def source(name: str) -> str:
    spec = find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / "serve" / "_private" / name).read_text()


def test_the_hook_is_there() -> None:
    assert hasattr(Application, application.HOOK)
    assert "ingress_request_router" in source("build_app.py")


def test_ray_waits_for_a_replica_where_we_limit_it() -> None:
    assert "_active_request_router._choose_replica_for_request(" in source("router.py")
    assert hasattr(RequestRouter, "_choose_replica_for_request")


def test_haproxy_asks_as_the_front_expects() -> None:
    rules = source("ingress_request_router.lua.tmpl")
    assert "POST /internal/route" in rules
    assert "X-Body-Truncated" in rules
    assert "x-request-id" in rules
    (pattern,) = re.findall(r'json_body:match\(\'("replica_id".+?)\'\)', rules)
    answer = json.dumps({"host": "", "port": 0, "replica_id": "SERVE_REPLICA::headstart#Replica#abc"})
    found = re.search(pattern.replace("%s", r"\s"), answer)
    assert found is not None
    assert found[1] == "SERVE_REPLICA::headstart#Replica#abc"


def test_haproxy_takes_the_header_of_a_booking_from_the_front_only() -> None:
    rules = source("ingress_request_router.lua.tmpl")
    assert "json_body:match('\"request_headers\"%s*:%s*{(.-)}')" in rules
    assert "txn.http:req_set_header(name, value)" in rules
    (prefix,) = re.findall(r'SERVE_INGRESS_ROUTER_HEADER_PREFIX = "(.+?)"', source("constants.py"))
    assert booked.BOOKING.startswith(prefix)
    assert "del-header {{ ingress_request_router_header_prefix }} -m beg" in source("haproxy_templates.py")


def test_the_variables_of_direct_mode_are_read() -> None:
    constants = source("constants.py") + source("common.py") + source("haproxy.py")
    for name in (*launch.DIRECT, *launch.PORTS):
        assert name in constants, name


def test_two_fleets_on_one_machine_have_different_ports() -> None:
    one, other = (launch.environment(direct=True, local=True) for _ in range(2))
    ports = [one[name] for name in launch.PORTS]
    assert len({*ports}) == len(launch.PORTS)
    assert not {"8404", "9101", "8500", "9500"} & {*ports}
    assert one.keys() == other.keys() == {*launch.LOCAL, *launch.DIRECT, *launch.PORTS}


def test_a_cluster_that_runs_keeps_its_ports() -> None:
    assert launch.environment(direct=True, local=False) == launch.DIRECT
    assert launch.environment(direct=False, local=True) == launch.LOCAL


def test_the_front_answers_with_a_replica() -> None:
    async def run() -> tuple[httpx.Response, httpx.Response]:
        front = direct.DirectFront.__new__(direct.DirectFront)
        setup = FleetSetup(Settings(), engine=FakeEngine, tokenizer=FakeEngine.load_tokenizer)
        front._process = fronting.FrontProcess(setup)
        transport = httpx.ASGITransport(front.__serve_build_asgi_app__())
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            nobody = await client.post("/internal/route", json={"messages": []})
            front._process.front.report(ReplicaReport("a", 1, 0), ModelCard(b"f" * 32, 8, False, 1024))
            return nobody, await client.post("/internal/route", json={"messages": [{"role": "user", "content": "Hi"}]})

    nobody, somebody = asyncio.run(run())
    assert nobody.status_code == 503
    chosen = somebody.json()
    (booking,) = chosen.pop("request_headers").values()
    assert chosen == {"host": "", "port": 0, "replica_id": "a"}
    assert re.fullmatch("[0-9a-f]{32}", booking)
