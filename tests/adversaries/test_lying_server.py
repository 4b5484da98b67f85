"""A server that does not follow the protocol asks a node for more than the node agreed to.

Every request of an honest run is recorded, changed, and sent to the node again:

    plain        an order without a request for a secure sum, though the config has `secagg`
    format       a sum with other bits, or that opens with a single message
    place        a sum of another round; a training order after the last round, which had no noise
    members      a second sum of one round without client 1, whose difference is its update
    sybils       a sum with clients that the run does not have, to make each one's noise smaller
    absent       a number of clients above that of the sum, for smaller parts of a common noise
    config       another config under the name of a run that the node accepted
    repetition   the same order many times, to average the noise away
    paths        a config that names files of the node
"""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from in_process import RUN, InProcessTransport

from perdure.config import dump, parse
from perdure.contract.uploads import FailedUpload
from perdure.core.errors import UserError
from perdure.federation.messages import BadMessage, pack, read_header, read_upload, unpack
from perdure.federation.node.policy import NodePolicy, read_policy
from perdure.federation.node.worker import make_node
from perdure.federation.server.engine import FlowerEngine
from perdure.methods.parts.sketches import SketchNoise
from perdure.privacy.secagg.layout import FixedPoint
from perdure.privacy.secagg.messages import SumRequest, decode, encode
from perdure.runs.run import run
from perdure.training.settings import with_method_defaults

CONFIG = {
    "stream": {"kind": "permuted", "tasks": 1},
    "clients": {"count": 4},
    "model": {"kind": "mlp", "hidden": [4]},
    "train": {"rounds": 2, "max_steps": 1},
    "data": {"limit": 120},
    "engine": {"kind": "flower"},
    "device": "cpu",
}
SECURE = {"privacy": {"secagg": True}}
NOISY = {"privacy": {"clip": 1.0, "noise": 2.0, "mode": "local"}, "train": {**CONFIG["train"]}}


class Recorder(InProcessTransport):
    """Keeps all requests and replies."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = []

    def send_and_receive(self, headers, body, limit):
        replies = super().send_and_receive(headers, body, limit)
        self.seen += [(n, header, body, replies[n]) for n, header in headers.items()]
        return replies

    def requests(self, kind, node=0):
        """Return the requests of a kind to a node, as headers, bodies and replies."""
        found = [(read_header(h), body, reply) for n, h, body, reply in self.seen if n == node]
        return [each for each in found if each[0].kind == kind]


def recorded(tmp_path, **changes) -> Recorder:
    """Run a config, and return the recording with the nodes as they are before the run's end."""
    config = with_method_defaults(parse({**CONFIG, **changes}))
    transport = Recorder(config, tmp_path)
    run(config, engine=FlowerEngine(4, transport))
    return transport


def changed_sum(body, change):
    """Return a body whose request for a sum is changed."""
    tree = unpack(body)
    wanted = change(decode(bytes.fromhex(tree["sum_request"]), SumRequest))
    return pack({**tree, "sum_request": encode(wanted).hex()})


# ---- secure sums


def test_an_order_for_a_plain_upload_is_refused_under_secagg(tmp_path):
    transport = recorded(tmp_path, **SECURE)
    header, body, _ = transport.requests("train")[0]
    tree = unpack(body)
    del tree["sum_request"]
    with pytest.raises(BadMessage, match="the config of the run asks for masked uploads"):
        transport.node(0).serve(header, pack(tree))


def test_a_call_is_refused_where_the_config_has_no_secagg(tmp_path):
    call = unpack(recorded(tmp_path / "a", **SECURE).requests("train")[0][1])["sum_request"]
    transport = recorded(tmp_path / "b")
    header, body, _ = transport.requests("train")[0]
    with pytest.raises(BadMessage, match="the config of the run asks for plain uploads"):
        transport.node(0).serve(header, pack({**unpack(body), "sum_request": call}))


CHANGES = {
    "bits": lambda r: replace(r, fixed_point=FixedPoint(32, 10, 4)),
    "precision": lambda r: replace(r, fixed_point=FixedPoint(64, 2, 4)),
    "clients of the format": lambda r: replace(
        r, fixed_point=FixedPoint(64, r.fixed_point.precision, 10**9)
    ),
    "single message": lambda r: replace(r, single_message=not r.single_message),
    "round": lambda r: replace(r, session=replace(r.session, round=r.session.round + 1)),
    "task": lambda r: replace(r, session=replace(r.session, task=r.session.task + 1)),
    "threshold": lambda r: replace(r, threshold=2),
    "sybils": lambda r: replace(
        r, public_keys={**r.public_keys, 4: bytes(range(32)), 5: bytes(range(1, 33))}
    ),
    "two clients": lambda r: replace(
        r, public_keys={c: r.public_keys[c] for c in (0, 1)}, threshold=2
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_sum_that_is_not_the_configs_is_refused(change, tmp_path):
    transport = recorded(tmp_path, **SECURE)
    header, body, _ = transport.requests("train")[1]
    with pytest.raises(BadMessage):
        transport.node(0).serve(header, changed_sum(body, CHANGES[change]))


def test_parts_of_noise_are_of_the_clients_in_the_sum(tmp_path, monkeypatch):
    """The header says four clients; the sum has keys of three."""
    counts, add_noise = [], SketchNoise.add_noise

    def count(self, sketches, fractions, clients, generator):
        counts.append(clients)
        return add_noise(self, sketches, fractions, clients, generator)

    monkeypatch.setattr(SketchNoise, "add_noise", count)
    method = {"kind": "fot", "sketch_noise": "standard"}
    config = with_method_defaults(parse({**CONFIG, **SECURE, "method": method}))
    transport = Recorder(config, tmp_path)
    transport.spoil = lambda node, request, reply: (
        FailedUpload(3, "no key") if node == 3 and request.kind == "public_keys" else reply
    )
    run(config, engine=FlowerEngine(4, transport))
    header, body, _ = transport.requests("exchange")[0]
    assert header.position.clients_with_data == 4
    assert len(decode(bytes.fromhex(unpack(body)["sum_request"]), SumRequest).public_keys) == 3
    assert set(counts) == {3}


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_second_member_set_of_a_round_is_refused(attempt, tmp_path):
    """Sums over {0, 1, 2, 3} and {0, 2, 3} would give client 1's update as a difference."""
    transport = recorded(tmp_path, **SECURE)

    def without_1(request):
        keys = {c: key for c, key in request.public_keys.items() if c != 1}
        session = replace(request.session, attempt=attempt, nonce=f"{attempt}")
        form = FixedPoint(64, request.fixed_point.precision, 3)
        return replace(request, public_keys=keys, threshold=3, session=session, fixed_point=form)

    for number in (0, 2, 3):
        header, body, _ = transport.requests("train", number)[0]
        transport.nodes.clear()  # the node was restarted meanwhile
        with pytest.raises(BadMessage, match="took part in another sum of task 1, round 1"):
            transport.node(number).serve(header, changed_sum(body, without_1))


# ---- orders that the run does not have


@pytest.mark.parametrize(
    "at", [{"round": 2}, {"round": 7, "rounds": 9}, {"exchange": 1}, {"exchange": -1}], ids=str
)
def test_a_training_order_outside_of_the_rounds_is_refused(at, tmp_path):
    transport = recorded(tmp_path, **NOISY)
    header, body, _ = transport.requests("train")[0]
    with pytest.raises(BadMessage, match=r"is no part of task 1|does not exist"):
        transport.node(0).serve(replace(header, position=replace(header.position, **at)), body)


def test_a_number_of_clients_in_a_header_is_refused(tmp_path):
    """It once decided the noise: 10**12 clients made it vanish."""
    header = json.loads(recorded(tmp_path).seen[0][1])
    with pytest.raises(BadMessage, match="must have exactly the keys"):
        read_header(json.dumps({**header, "sampled": 10**12}))


def test_the_learning_rate_is_the_configs(tmp_path):
    header = json.loads(recorded(tmp_path).seen[0][1])
    assert "lr" not in header["position"]


def test_another_config_of_an_accepted_run_is_refused(tmp_path):
    transport = recorded(tmp_path, **SECURE)
    weaker = with_method_defaults(parse(CONFIG))
    settings = {"number": 0, "state": str(tmp_path / "node-0" / "state")}
    with pytest.raises(BadMessage, match="another config than the one that this node accepted"):
        make_node({"run": RUN, "config": dump(weaker)}, settings, transport.policy)


# ---- repetitions


@pytest.mark.parametrize(
    "changes",
    [NOISY, SECURE, {"privacy": {**NOISY["privacy"], "secagg": True, "mode": "central"}}],
    ids=["noise", "secagg", "secagg and noise"],
)
def test_a_repeated_order_gets_the_same_bytes(changes, tmp_path):
    transport = recorded(tmp_path, **changes)
    for header, body, reply in transport.requests("train"):
        transport.nodes.clear()
        assert transport.node(0).serve(header, body) == reply
    again = [entry for entry in released(tmp_path) if entry.get("repeated")]
    assert len(again) == 2


def test_a_repeated_exchange_gets_the_same_sketch(tmp_path):
    transport = recorded(tmp_path, method={"kind": "fot"})
    header, body, reply = transport.requests("exchange")[0]
    transport.nodes.clear()
    assert transport.node(0).serve(header, body) == reply


def test_another_order_at_the_same_place_is_a_new_release(tmp_path):
    """Its noise is new: with the old one, the difference of the two replies would have none."""
    transport = recorded(tmp_path, **NOISY)
    header, body, reply = transport.requests("train")[0]
    tree = unpack(body)
    tree["params"]["fc1.bias"] = tree["params"]["fc1.bias"] + 1e-6
    other = transport.node(0).serve(header, pack(tree))
    difference = torch.cat([(update(other)[n] - v).flatten() for n, v in update(reply).items()])
    assert difference.std() == pytest.approx(2.0 * 2**0.5, rel=0.2)
    assert unpack(other)["releases"] == {"0": 2}


def test_a_new_release_is_counted_by_the_accountant(tmp_path):
    """An earlier life of the server had asked for round 1 with another model."""
    first = recorded(tmp_path / "first", **NOISY)
    header, body, _ = first.requests("train")[0]
    tree = unpack(body)
    tree["params"]["fc1.bias"] = tree["params"]["fc1.bias"] + 1e-6
    config = first.config
    second = Recorder(config, tmp_path / "second")
    second.node(0).serve(header, pack(tree))
    values = run(config, engine=FlowerEngine(4, second)).values["privacy"]
    assert values["sums_of_one_client"] == 3
    clean = run(config, engine=FlowerEngine(4, Recorder(config, tmp_path / "clean")))
    assert clean.values["privacy"]["sums_of_one_client"] == 2
    assert values["epsilon"] > clean.values["privacy"]["epsilon"]


def update(reply):
    return read_upload(unpack(reply)["uploads"]["0"])["update"].value


def released(tmp_path, number=0):
    lines = (tmp_path / f"node-{number}" / "released.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


# ---- the end


def test_a_run_that_has_ended_is_over_and_its_rows_are_deleted(tmp_path):
    config = with_method_defaults(parse({**CONFIG, "method": {"kind": "er"}}))
    transport = Recorder(config, tmp_path)
    engine = FlowerEngine(4, transport)
    run(config, engine=engine)
    folder = tmp_path / "node-0" / "state" / RUN
    assert any(folder.rglob("*.safetensors"))
    header, body, _ = transport.requests("train")[0]
    engine.end_run()
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "config.sha256", "ended"]
    transport.nodes.clear()
    with pytest.raises(BadMessage, match="the run has ended on this node"):
        transport.node(0).serve(header, body)


def test_an_owner_may_keep_what_clients_stored(tmp_path):
    config = with_method_defaults(parse({**CONFIG, "method": {"kind": "er"}}))
    transport = Recorder(config, tmp_path)
    transport.policy = transport.policy.model_copy(update={"keep_state": True})
    engine = FlowerEngine(4, transport)
    run(config, engine=engine)
    engine.end_run()
    assert any((tmp_path / "node-0" / "state" / RUN).rglob("*.safetensors"))


def test_what_a_node_stores_is_for_its_owner_alone(tmp_path):
    recorded(tmp_path, method={"kind": "er"}, **SECURE)
    home = tmp_path / "node-0"
    for path in (home / "state" / RUN, home / "released.jsonl"):
        assert not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)


# ---- what the log says


def test_the_log_says_what_left_the_node(tmp_path):
    recorded(tmp_path, **{"privacy": {"clip": 1.0, "noise": 2.0, "mode": "local"}})
    entries = [entry for entry in released(tmp_path) if entry["kind"] == "train"]
    assert [(e["task"], e["round"], e["client"], e["rows"]) for e in entries] == [
        (0, 0, 0, 30), (0, 1, 0, 30),
    ]  # fmt: skip
    (field,) = [entries[0]["fields"]["update"]]
    assert field["type"] == "Sum"
    assert field["shapes"]["fc1.weight"] == [4, 64]
    assert field["bytes"] == 4 * sum(4 * 64 + 4 + 10 * 4 + 10 for _ in range(1))
    assert (entries[0]["clip"], entries[0]["noise"], entries[0]["masked"]) == (1.0, 2.0, False)


# ---- the owner's policy

LOCAL = {"federation": {"classes": list("0123456789"), "shape": [1, 8, 8]}}
DATA = {"data": {"mean": [0.3], "std": [0.38]}, "stream": {"kind": "domains", "tasks": 1}}


def offer(tmp_path, policy, **changes):
    """Offer a run to a node with this policy."""
    config = with_method_defaults(parse({**CONFIG, **DATA, **LOCAL, **changes}))
    settings = {"number": 0, "state": str(tmp_path / "state"), "data": str(tmp_path)}
    make_node({"run": RUN, "config": dump(config)}, settings, NodePolicy(**policy))


REFUSED = {
    "require_secagg": ({"require_secagg": True}, {}, "privacy.secagg must be true, got False"),
    "min_clients": ({"min_clients": 5}, {}, "clients.count must be at least 5, got 4"),
    "min_noise": ({"min_noise": 1.0}, {}, "privacy.noise must be at least 1"),
    "noise of the server": (
        {"min_noise": 1.0}, {"privacy": {"clip": 1.0, "noise": 2.0}}, "privacy.noise must be"
    ),
    "methods": ({"methods": ["fot"]}, {}, "method.kind must be fot, got 'fedavg'"),
    "a function": ({}, {"model": {"kind": "os.system", "command": "true"}}, "kind must be built"),
    "a class": ({}, {"model": {"kind": "subprocess.Popen", "args": "true"}}, "kind must be built"),
    "a file of the node": ({}, {"model": {"kind": "vit", "init": "/etc/x"}}, "model.init must be"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_run_that_the_owner_does_not_allow_is_refused(case, tmp_path):
    policy, changes, sentence = REFUSED[case]
    with pytest.raises(BadMessage, match=sentence):
        offer(tmp_path, policy, **changes)
    assert not (tmp_path / "state").exists()


def test_an_allowed_run_is_accepted(tmp_path):
    policy = {"require_secagg": True, "min_clients": 4, "methods": ["fedavg"]}
    offer(tmp_path, policy, **SECURE)


@pytest.mark.parametrize("exists", [True, False])
def test_a_config_without_federation_reads_no_file_of_the_node(exists, tmp_path):
    """The sentence is the same whether or not the file exists."""
    if exists:
        (tmp_path / "secret.npz").touch()
    config = {**CONFIG, "data": {"source": "npz", "path": str(tmp_path / "secret.npz")}}
    text = dump(parse(config))
    settings = {"number": 0, "state": str(tmp_path / "state"), "data": str(tmp_path)}
    with pytest.raises(BadMessage) as refusal:
        make_node({"run": RUN, "config": text}, settings, NodePolicy())
    assert str(refusal.value) == (
        "policy.files of this node: federation must be a section that says what nodes agree on, "
        "got None"
    )


def test_fields_that_the_owner_does_not_list_stay_on_the_node(tmp_path):
    config = with_method_defaults(parse({**CONFIG, "method": {"kind": "fot"}}))
    transport = Recorder(config, tmp_path)
    transport.policy = transport.policy.model_copy(update={"fields": ("update",)})
    replies = []
    transport.spoil = lambda node, request, reply: replies.append((request.kind, reply)) or reply
    with pytest.raises(Exception, match="no client sent a valid upload"):
        run(config, engine=FlowerEngine(4, transport))
    refusals = [reply.reason for kind, reply in replies if kind == "exchange"]
    assert refusals
    assert all("policy.fields of this node: upload must be update" in r for r in refusals)


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        ({"min_row": 3}, "unknown key"),
        ({"min_rows": -1}, "policy.min_rows: must be at least 0, got -1"),
        ({"code": 3}, "policy.code"),
        ([1], "policy"),
    ],
)
def test_a_wrong_policy_is_named(policy, sentence):
    with pytest.raises(UserError, match=sentence):
        read_policy({"policy": policy}, "node.yaml")


# ---- code of a submission


def test_a_method_file_runs_only_if_its_hash_is_listed(tmp_path, monkeypatch):
    from perdure.core.files import sha256

    source = (Path(__file__).parents[1] / "federation" / "phased.py").read_bytes()
    (tmp_path / "their_method.py").write_bytes(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    method = {"method": {"kind": "their_method.Phased"}}
    with pytest.raises(BadMessage, match="listed by its dotted path or by the SHA-256"):
        offer(tmp_path, {"code": [sha256(b"another file")]}, **method)
    offer(tmp_path, {"code": [sha256(source)]}, **method)
