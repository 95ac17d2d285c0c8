import os
import subprocess
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titogym.envs.sandboxes import owners


def test_an_id_names_this_process():
    owner = owners.owner_of(owners.new_id())
    assert owner == owners.me()
    assert owner.pid == os.getpid()
    assert not owner.dead()


def test_an_ended_process_is_dead_even_as_a_zombie():
    child = subprocess.Popen(["sleep", "60"])
    started = owners._started(child.pid)
    assert started is not None
    owner = replace(owners.me(), pid=child.pid, started=started)
    assert not owner.dead()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    assert owner.dead()
    child.wait()
    assert owner.dead()


def test_a_reused_pid_is_another_owner():
    me = owners.me()
    assert replace(me, started=me.started - 1).dead()


def test_owners_that_cannot_be_seen_are_left_alone():
    me = owners.me()
    for elsewhere in ({"namespace": me.namespace + 1}, {"boot": "another-machine"}):
        owner = replace(me, started=me.started - 1, **elsewhere)
        assert not owner.visible()
        assert not owner.dead()


def test_an_owner_survives_its_label():
    assert owners.parse(str(owners.me())) == owners.me()
    assert owners.parse("1-2-3") is None
    assert owners.parse("boot/1-2-x") is None


@given(st.text(max_size=40))
def test_other_names_are_no_ids(name):
    assert owners.owner_of(name) is None


@pytest.mark.parametrize("name", ["probe-12", "1-2-3", "1-2-x-abc", "record.json", ""])
def test_names_like_ids(name):
    assert owners.owner_of(name) is None
