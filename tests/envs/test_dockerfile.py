import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titogym.envs import dockerfile
from titogym.envs.dockerfile import Copy, Run


def test_the_plain_instructions():
    recipe = dockerfile.parse(
        """\
# syntax=docker/dockerfile:1
FROM python:3.11-slim-bookworm
ARG NAME=world
ENV GREETING="hello ${NAME}" \\
    # a comment in between
    COLOUR=blue
ENV OLD the whole rest
WORKDIR /app
WORKDIR sub
COPY a.txt b/ ./data/
COPY --chmod=755 --chown=root:root run.sh /opt/run
ADD ["with space.txt", "/app/x"]
RUN mkdir -p /data && printf '%s' "$GREETING" > /data/hi ; chmod 600 /data/hi
LABEL x=y
EXPOSE 80
USER root
CMD ["bash"]
"""
    )
    assert recipe.refused == ()
    assert recipe.base == "python:3.11-slim-bookworm"
    assert recipe.workdir == "/app/sub"
    assert recipe.env == {"GREETING": "hello world", "COLOUR": "blue", "OLD": "the whole rest"}
    copies = [step for step in recipe.steps if isinstance(step, Copy)]
    assert copies == [
        Copy(("a.txt", "b/"), "/app/sub/data", into=True),
        Copy(("run.sh",), "/opt/run", into=False, mode="755"),
        Copy(("with space.txt",), "/app/x", into=False),
    ]
    run = [step for step in recipe.steps if isinstance(step, Run)][-1]
    assert run.cwd == "/app/sub"
    assert run.line == 13
    assert run.env["GREETING"] == "hello world"


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("RUN apt-get update && apt-get install -y gcc", "apt-get"),
        ("RUN echo ok && pip install numpy", "pip"),
        ("RUN mkdir x | curl http://example.org", "curl"),
        ("RUN echo $(curl http://example.org)", "substitutes a command"),
        ("RUN (cd x; make)", "shell syntax"),
        ("RUN sleep 9 &", "sleep"),
        ('RUN ["git", "clone", "x"]', "git"),
        ("RUN <<EOF", "here-documents"),
        ("COPY --from=builder /x /y", "--from"),
        ("COPY --chown=app:app x /y", "--chown"),
        ("COPY ../x /y", "outside the build context"),
        ("ADD https://example.org/x /y", "URL"),
        ("ADD x.tar.gz /y", "archive"),
        ("USER nobody", "USER"),
        ("ENTRYPOINT /start", "ENTRYPOINT"),
        ("HEALTHCHECK CMD true", "HEALTHCHECK"),
        ("FROM scratch AS second", "several stages"),
        ("WORKDIR /a/../b", ".."),
        ("WORKDIR /usr/src/app", "/usr is read-only"),
        ("COPY x /usr/local/bin/x", "/usr is read-only"),
        ("COPY x", "no target"),
        ("RUN [1, 2]", "list of texts"),
        ("ENV X=${Y:-z}", "substitution"),
        ("SHELL ['/bin/bash']", "SHELL"),
        ("BOGUS", "BOGUS"),
        ("COPY", "COPY"),
        ("ENV", "ENV"),
        ("RUN echo 'unbalanced", "unbalanced"),
    ],
)
def test_what_needs_a_container_engine_is_named_with_its_line(line, named):
    recipe = dockerfile.parse(f"FROM debian:bookworm\n\n{line}\n")
    assert len(recipe.refused) == 1
    assert recipe.refused[0].startswith("line 3 (")
    assert named in recipe.refused[0]


@pytest.mark.parametrize("image", ["ghcr.io/someone/tools:1", "nvidia/cuda:12", "node:22", "my/python:3"])
def test_images_that_hold_more_than_a_plain_system(image):
    assert "more than a plain system" in dockerfile.parse(f"FROM {image}\n").refused[0]


@pytest.mark.parametrize("image", ["debian", "ubuntu:24.04", "docker.io/library/python:3.13@sha256:00"])
def test_plain_images(image):
    assert dockerfile.parse(f"FROM --platform=linux/amd64 {image} AS base\n").refused == ()


words = st.text(string.ascii_letters + string.punctuation + " \\\n\t", max_size=30)


@given(
    st.lists(
        st.tuples(st.sampled_from(["FROM", "COPY", "RUN", "ENV", "ARG", "WORKDIR", "ADD", "#", ""]), words)
    )
)
def test_nothing_that_is_written_makes_it_fail(lines):
    recipe = dockerfile.parse("\n".join(f"{keyword} {rest}" for keyword, rest in lines))
    for step in recipe.steps:
        if isinstance(step, Run) and not step.command.startswith("mkdir -p"):
            assert not {"curl", "wget", "sudo"} & set(step.command.split()[:1])


def test_sources_of_a_copy(tmp_path):
    (tmp_path / "data" / "inner").mkdir(parents=True)
    (tmp_path / "one.txt").touch()
    (tmp_path / "two.txt").touch()

    def targets(sources, target, into):
        step = Copy(tuple(sources), target, into)
        return {
            str(path.relative_to(tmp_path)): inside for path, inside in dockerfile.sources(tmp_path, step)
        }

    assert targets(["data"], "/app", False) == {"data": "/app"}
    assert targets(["one.txt"], "/app/x", False) == {"one.txt": "/app/x"}
    assert targets(["one.txt"], "/app", True) == {"one.txt": "/app/one.txt"}
    assert targets(["*.txt"], "/app", True) == {"one.txt": "/app/one.txt", "two.txt": "/app/two.txt"}
    assert targets(["."], "/app", True) == {".": "/app"}
    with pytest.raises(FileNotFoundError, match=r"three\.txt"):
        targets(["three.txt"], "/app", True)
