"""Buckets, the layout of files, deltas, versions on disk and their replicas, transfer plans, receivers."""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import zlib
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from titogym.trainer.weights import delta, receiver, versions
from titogym.trainer.weights.engines import WeightUpdateError
from titogym.trainer.weights.layout import contents, layout
from titogym.trainer.weights.plan import plan
from titogym.trainer.weights.prepare import buckets
from titogym.trainer.weights.versions import Replica, VersionPublisher

pytestmark = pytest.mark.train


def weights(seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.embed_tokens.weight": scale * torch.randn(50, 8, generator=generator),
        "model.norm.weight": (scale * torch.randn(8, generator=generator)).to(torch.bfloat16),
        "lm_head.weight": scale * torch.randn(50, 8, generator=generator),
        "odd": torch.arange(7, dtype=torch.int8),
    }


def cut(tensors, limit=1000):
    return list(buckets(tensors.items(), limit))


def test_buckets_keep_order_and_bound():
    made = {
        name: torch.ones(shape)
        for name, shape in {"a": (100, 7), "b": (3,), "c": (64, 64), "d": (5, 5)}.items()
    }
    made["e"] = torch.ones(31).to(torch.bfloat16)
    found = list(buckets(made.items(), 3000))
    assert [bucket.names for bucket in found] == [["a", "b"], ["c"], ["d", "e"]]  # c alone is above the bound
    assert found[2].dtypes == ["float32", "bfloat16"]
    assert found[2].flat.nbytes == 5 * 5 * 4 + 31 * 2


def test_wider_types_come_first_so_that_every_tensor_is_aligned():
    made = {"x.a": torch.ones(3, dtype=torch.bfloat16), "x.b": torch.arange(2.0), "x.c": torch.ones(1).half()}
    (bucket,) = buckets(made.items(), 10**6)
    assert bucket.names == ["x.b", "x.a", "x.c"]
    for name, tensor in bucket.tensors():
        assert tensor.equal(made[name])


def test_atomic_groups_are_not_cut():
    layer = "model.layers.0.self_attn"
    names = [f"{layer}.{part}_proj.weight" for part in "qkvo"]
    names += ["model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight_scale_inv"]
    found = list(buckets(((name, torch.ones(10)) for name in names), 40))
    assert [bucket.names for bucket in found] == [names[:3], names[3:4], names[4:]]


def test_experts_count_as_often_as_ranks_hold_them():
    names = [f"model.layers.0.mlp.experts.{i}.down_proj.weight" for i in range(8)]
    made = [(name, torch.ones(10)) for name in names]
    assert [len(bucket.names) for bucket in buckets(made, 160)] == [4, 4]
    assert [len(bucket.names) for bucket in buckets(made, 160, expert_factor=2)] == [2, 2, 2, 2]


def test_the_file_is_the_librarys_own_byte_for_byte():
    made = weights()
    found = cut(made)
    wanted = layout(found)
    file = bytearray(wanted.size)
    file[: len(wanted.header)] = wanted.header
    for name, part in contents(found):
        entry = wanted.entries[name]
        file[entry.start : entry.end] = part.tobytes()
    assert bytes(file) == save(made, metadata={"format": "pt"})


@given(
    old=st.binary(min_size=0, max_size=64),
    item_size=st.sampled_from([1, 2, 4]),
    encoding=st.sampled_from(["xor", "overwrite"]),
    data=st.data(),
)
def test_a_delta_gives_back_the_new_bytes(old, item_size, encoding, data):
    old = old[: len(old) // item_size * item_size]
    new = data.draw(st.binary(min_size=len(old), max_size=len(old)))
    before = np.frombuffer(old, np.uint8).copy()
    coded = delta.encode(before, np.frombuffer(new, np.uint8), item_size, encoding)
    delta.apply(coded, before, item_size, encoding)
    assert before.tobytes() == new


@given(data=st.binary(max_size=40), encoding=st.sampled_from(["xor", "overwrite"]))
def test_garbage_is_no_delta(data, encoding):
    with pytest.raises(delta.DeltaError):
        delta.apply(data, np.zeros(8, np.uint8), 4, encoding)


@pytest.fixture
def model_dir(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"old")
    (folder / "model.safetensors.index.json").write_text("{}")
    return folder


def small_step(tensors, seed):
    generator = torch.Generator().manual_seed(seed)
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    changed["lm_head.weight"] += 1e-3 * torch.randn(50, 8, generator=generator)
    return changed


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_replica_follows_and_late_ones_catch_up(tmp_path, model_dir, encoding):
    root = tmp_path / "versions"
    publisher = VersionPublisher(root, encoding, rebase_every=3)
    near, late = Replica(tmp_path / "near", model_dir), Replica(tmp_path / "late")
    made, sizes = weights(), []
    for version in range(9):
        sizes.append(publisher.publish(cut(made), str(version)))
        path = near.advance(root, str(version))
        assert (path / "model.safetensors").read_bytes() == save(made, metadata={"format": "pt"})
        if version in (2, 8):  # from a whole version, and over the next ones
            path = late.advance(root, str(version))
            assert all(load_file(path / "model.safetensors")[name].equal(made[name]) for name in made)
        made = small_step(made, version)
    assert sorted(path.name for path in near.advance(root, "8").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    whole = [size.changed == sum(tensor.nbytes for tensor in weights().values()) for size in sizes]
    assert whole == [True, False, False, False] * 2 + [True]
    assert all(0 < size.changed <= 1600 for size, base in zip(sizes, whole, strict=True) if not base)
    assert (
        len(list((tmp_path / "near").iterdir())) == 2
    )  # the one that engines may still read, and the new one
    assert {folder.name for folder in root.iterdir()} == {*"45678", "publisher.lock"}


def test_conflicting_publishers_fail_and_retries_do_not(tmp_path):
    root = tmp_path / "versions"
    publisher = VersionPublisher(root, "xor", 20)
    publisher.publish(cut(weights()), "1")
    with pytest.raises(WeightUpdateError, match="Another process publishes"):
        VersionPublisher(root, "xor", 20)
    assert publisher.publish(cut(weights()), "1").written == 0
    with pytest.raises(WeightUpdateError, match="already published"):
        publisher.publish(cut(weights(1)), "1")
    publisher.close()
    VersionPublisher(root, "xor", 20).publish(cut(weights()), "1")


def test_what_a_killed_publisher_left_does_not_count(tmp_path):
    root = tmp_path / "versions"
    publisher = VersionPublisher(root, "xor", 20)
    publisher.publish(cut(weights()), "1")
    (root / "2").mkdir()
    (root / "2" / versions.WEIGHTS).write_bytes(b"half")
    (root / "2" / ".index.json").write_text("{")
    replica = Replica(tmp_path / "replica")
    with pytest.raises(WeightUpdateError, match="no weight version"):
        replica.advance(root, "2")
    publisher.publish(cut(weights(1)), "2")
    assert load_file(replica.advance(root, "2") / "model.safetensors")["odd"].equal(weights()["odd"])


def test_damage_is_found_and_the_replica_keeps_what_it_holds(tmp_path):
    root = tmp_path / "versions"
    publisher = VersionPublisher(root, "overwrite", 20)
    publisher.publish(cut(weights()), "1")
    publisher.publish(cut(small_step(weights(), 0)), "2")
    replica = Replica(tmp_path / "replica")
    held = replica.advance(root, "1")
    file, index = root / "2" / versions.WEIGHTS, root / "2" / versions.INDEX
    data, text = file.read_bytes(), index.read_text()

    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(WeightUpdateError, match="lm_head"):
        replica.advance(root, "2")
    file.write_bytes(data)

    other = json.loads(text)
    stored = other["tensors"]["lm_head.weight"]
    index.write_text(
        json.dumps(other | {"tensors": other["tensors"] | {"lm_head.weight": stored | {"digest": "0"}}})
    )
    with pytest.raises(WeightUpdateError, match=r"lm_head\.weight is not what was published"):
        replica.advance(root, "2")

    index.write_text(json.dumps(other | {"parent_checksum": "f" * 32}))
    with pytest.raises(WeightUpdateError, match="stands on another version"):
        replica.advance(root, "2")

    index.write_text(text[:-9])
    with pytest.raises(WeightUpdateError, match="damaged"):
        replica.advance(root, "2")

    assert load_file(held / "model.safetensors")["lm_head.weight"].equal(weights()["lm_head.weight"])
    index.write_text(text)
    assert replica.advance(root, "2") != held


def test_a_version_is_no_path(tmp_path):
    with pytest.raises(WeightUpdateError, match="cannot name"):
        VersionPublisher(tmp_path, "xor", 20).publish(cut(weights()), "../elsewhere")


@given(sources=st.integers(1, 12), targets=st.integers(1, 40))
def test_plans_serve_every_target_once_and_share_evenly(sources, targets):
    made = plan(sources, targets)
    assert sorted(transfer.target for transfer in made) == list(range(targets))
    first = made[: min(sources, targets)]
    assert [(t.source, t.target) for t in first] == [(i, i) for i in range(len(first))]
    loads = Counter(transfer.source for transfer in made)
    assert max(loads.values()) - min(loads[i] for i in range(sources)) <= 1


def test_nobody_cannot_send():
    with pytest.raises(ValueError, match="at least one source"):
        plan(0, 3)


@pytest.fixture
def peer(tmp_path):
    """A receiver process and a way to talk to it."""
    token = secrets.token_hex()
    process = subprocess.Popen(
        [sys.executable, "-m", "titogym.trainer.weights.receiver", str(tmp_path / "received")],
        stdout=subprocess.PIPE,
        env=os.environ | {receiver.TOKEN: token},
    )
    assert process.stdout is not None
    port = int(process.stdout.readline())

    def connect(said=token):
        connection = socket.create_connection(("127.0.0.1", port), 10)
        answers = connection.makefile("rb")
        connection.sendall(said.encode() + b"\n")

        def ask(data=b"", **head):
            connection.sendall(json.dumps(head).encode() + b"\n" + data)
            line = answers.readline()
            return json.loads(line) if line else None

        return connection, ask

    yield connect
    process.kill()
    process.wait()
    shutil.rmtree(tmp_path / "received", ignore_errors=True)


def test_a_receiver_refuses_what_does_not_fit_and_goes_on(peer):
    _, ask = peer()
    data = b"0123456789"
    crc = zlib.crc32(data)
    assert "outside" in ask(data, op="write", offset=0, length=10, crc=crc)["error"]
    assert "no version" in ask(op="open", version="../x", size=10)["error"]
    assert ask(op="open", version="1", size=20) == {}
    assert "outside" in ask(data, op="write", offset=15, length=10, crc=crc)["error"]
    assert "damaged" in ask(data, op="write", offset=0, length=10, crc=crc + 1)["error"]
    assert ask(data, op="write", offset=0, length=10, crc=crc) == {}
    assert "10 bytes are missing" in ask(op="commit", files={})["error"]
    assert ask(data, op="write", offset=10, length=10, crc=crc) == {}
    assert "no file" in ask(op="commit", files={"../x": ""})["error"]
    path = ask(op="commit", files={"config.json": "{}"})["path"]
    with open(f"{path}/model.safetensors", "rb") as file:
        assert file.read() == 2 * data


def test_a_receiver_serves_nobody_without_the_token(peer):
    connection, ask = peer("wrong")
    try:
        answer = ask(op="open", version="1", size=20)
    except ConnectionError:
        answer = None
    assert answer is None
    connection.close()
    assert peer()[1](op="open", version="1", size=20) == {}
