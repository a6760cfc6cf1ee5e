"""The launcher on a Ray cluster, with a cluster that does as a test says."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("ray")

from ray.exceptions import RayActorError

from hex_llm.config import Config
from hex_llm.errors import ConfigError, StartError
from hex_llm.launch import ray_launcher
from hex_llm.launch.placement import Seat
from hex_llm.launch.ray_launcher import HostActor, RayLauncher
from hex_llm.launch.task import EngineTask, Task


class Call:
    """A method of an actor: its answer is there unless the actor starts, and an error where it is dead."""

    def __init__(self, actor: "Actor", answer: object):
        self.actor = actor
        self._answer = answer

    def remote(self, *arguments: Any) -> "Call":
        self.arguments = arguments
        return self

    def get(self) -> object:
        assert self.actor.state != "starting", "nobody waits for that"
        if self.actor.state == "dead":
            raise RayActorError()
        return self._answer


class Actor:
    made: list["Actor"]
    first_state = "there"

    def __init__(self):
        self.state = Actor.first_state
        self.find, self.free_ports = Call(self, ("10.0.0.1", "")), Call(self, [7, 8])
        self.run = Call(self, 0)
        Actor.made.append(self)


@pytest.fixture
def launcher(monkeypatch) -> RayLauncher:
    Actor.made, Actor.first_state = [], "there"
    group = SimpleNamespace(wait=lambda seconds: True)
    monkeypatch.setattr(ray_launcher, "placement_group", lambda bundles, strategy: group)
    monkeypatch.setattr(ray_launcher, "HostActor", SimpleNamespace(options=lambda **_: SimpleNamespace(remote=Actor)))
    monkeypatch.setattr(ray_launcher.ray, "get", lambda calls, timeout: [call.get() for call in calls])
    monkeypatch.setattr(
        ray_launcher.ray,
        "wait",
        lambda calls, num_returns, timeout: ([call for call in calls if call.actor.state != "starting"], []),
    )
    monkeypatch.setattr(ray_launcher.ray, "kill", lambda actor: None)
    return RayLauncher([(Seat(0, 2, None), Seat(1, 2, None))], "cpu")


def test_an_actor_that_is_made_again_is_not_waited_for_and_replaced_where_it_dies(launcher):
    assert launcher.addresses(0, 2) == ["10.0.0.1:7", "10.0.0.1:8"]
    launcher.start(0, Task((EngineTask(Config()),), fronts=()), {})
    Actor.first_state = "starting"
    with pytest.raises(StartError, match="not there yet"):
        launcher.addresses(0, 2)
    again = Actor.made[-1]
    again.state = "dead"
    with pytest.raises(StartError, match="cannot be reached"):
        launcher.addresses(0, 2)
    with pytest.raises(StartError, match="not there yet"):
        launcher.addresses(0, 2)
    assert Actor.made[-1] is not again
    Actor.made[-1].state = "there"
    assert launcher.addresses(0, 2) == ["10.0.0.1:7", "10.0.0.1:8"]


def test_an_engine_asks_the_hub_as_whoever_gives_the_command(monkeypatch, request):
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    monkeypatch.setenv("HEXLLM_API_KEYS", "of the server")
    launcher = request.getfixturevalue("launcher")
    launcher.start(0, Task((EngineTask(Config()),), fronts=()), {})
    (environment,) = (actor.run.arguments[1] for actor in Actor.made if hasattr(actor.run, "arguments"))
    assert environment["HF_TOKEN"] == "hf_x"
    assert "HEXLLM_API_KEYS" not in environment


def test_an_engine_listens_for_others_at_its_actors_address_on_any_port(launcher, monkeypatch):
    started = []
    end = SimpleNamespace(poll=lambda: 0)
    monkeypatch.setattr(ray_launcher, "start_engine", lambda task, environment: started.append(task) or end)
    monkeypatch.setattr(ray_launcher.ray.util, "get_node_ip_address", lambda: "fd00::7")
    run = HostActor.__ray_metadata__.modified_class.run  # pyright: ignore[reportFunctionMemberAccess]
    for pages in (launcher.pages_address(0), ""):
        run(None, msgspec.json.encode(Task((EngineTask(Config(), pages=pages),), fronts=())), {})
    assert [engine.pages for task in started for engine in task.engines] == ["tcp:[fd00::7]:0", ""]


def test_a_cluster_without_room_for_engines_of_two_sizes_is_told_what_they_take(monkeypatch):
    group = SimpleNamespace(wait=lambda seconds: False)
    monkeypatch.setattr(ray_launcher, "placement_group", lambda bundles, strategy: group)
    monkeypatch.setattr(ray_launcher, "remove_placement_group", lambda group: None)
    for name in ("cluster_resources", "available_resources"):
        monkeypatch.setattr(ray_launcher.ray, name, lambda: {"CPU": 8, "GPU": 4})
    seats = [(Seat(0, 1, (4,)),), (Seat(0, 1, (5,)),), (Seat(0, 4, (0, 1, 2, 3)),)]
    with pytest.raises(ConfigError, match="no room for 2 times CPU 1, GPU 1 and 1 times CPU 1, GPU 4: it has CPU 8, "):
        RayLauncher(seats, "cuda")
