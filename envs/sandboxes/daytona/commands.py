"""Commands in a Daytona sandbox.

The API gives one text for both streams, no end to a command that hangs, and long requests that proxies cut.
So a supervisor inside runs each command beside the API's own process and writes its two streams to files;
short requests, each of which may be repeated, wait for its end and fetch the output. What ends a command
at its time limit is the driver.
"""

import base64
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from titogym.envs.sandboxes.base import SYSTEM_PATH
from titogym.envs.sandboxes.docker.commands import KILL_SCRIPT, MAIN, MARK, SHELL

WINDOW = 15.0  # s that one request waits for the end of a command
WINDOW_STREAMED = 1.0  # s between looks at output that somebody follows
ENVIRONMENT = {MARK: MAIN}  # of our own scripts, so that they are never taken for the agent's
PIECE = 1 << 19  # bytes of one stream that one answer brings

_PREAMBLE = f"""
path=${{TITOGYM_PATH-$PATH}}
export TITOGYM_PATH="$path"
PATH={SYSTEM_PATH}:$PATH
"""

# It finds a secret in a file, takes it away, and signs the command's end with it: a program under test cannot
# pretend that its tests have ended.
_SUPERVISOR = r"""
directory=$1 mark=$2 cwd=$3; shift 3
IFS= read -r secret <"$directory/secret"
rm "$directory/secret"
echo $$ >"$directory/pid"
kills() {
  count=0
  for file in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
    while read -r key value; do [ "$key" = oom_kill ] && count=$value; done <"$file"
  done 2>/dev/null
}
kills; before=$count
known=" $(echo /proc/[0-9]*) "
run() { cd "$cwd" && exec env -u TITOGYM_PATH PATH="$path" MARK="$mark" "$@"; }
run "$@" <"$directory/in" >"$directory/out" 2>"$directory/err" &
wait $!
status=$?
kills
left=0
for process in /proc/[0-9]*; do
  case $known in *" $process "*) continue ;; esac
  grep -q MARK=MAIN "$process/environ" 2>/dev/null && continue
  grep -q '^State:[^A-Za-z]*Z' "$process/status" 2>/dev/null && continue
  [ -d "$process" ] && left=$((left + 1))
done
printf '%s %s %s %s\n' "$secret" "$status" "$((count - before))" "$left" >"$directory/new"
mv "$directory/new" "$directory/end"
""".replace("MARK", MARK).replace("=MAIN", f"={MAIN}")

# Lays the secret down and becomes another program before the command starts: no command line shows it then.
_BEGIN = r"""
directory=$1 secret=$2 input=$3 request=$4; shift 4
if mkdir -m 700 "$directory" 2>/dev/null; then
  if [ -n "$input" ]; then mv "$input" "$directory/in"; else : >"$directory/in"; fi
  printf '%s\n' "$secret" >"$directory/secret"
  exec /bin/sh -c "$request" sh "$directory" "$@"
fi
turns=$1 out=$2 err=$3 piece=$4 # an earlier request, whose answer was lost, has begun
exec /bin/sh -c "$request" sh "$directory" "$turns" "$out" "$err" "$piece"
"""

# Starts the command if there is one, waits a while for its end, and shows what it has written from the given
# offsets on.
_REQUEST = r"""
directory=$1 turns=$2 out=$3 err=$4 piece=$5; shift 5
if [ $# -gt 0 ]; then
  supervisor=$1; shift
  begin() { command -v setsid >/dev/null && exec setsid "$@"; exec "$@"; }
  (begin /bin/sh -c "$supervisor" sh "$directory" "$@") </dev/null >/dev/null 2>&1 &
fi
alive() { [ ! -s "$directory/pid" ] || { read -r pid <"$directory/pid" && kill -0 "$pid"; } 2>/dev/null; }
turn=0
while [ ! -e "$directory/end" ] && [ "$turn" -lt "$turns" ] && alive; do sleep 0.05; turn=$((turn + 1)); done
end=
if alive || [ -e "$directory/end" ]; then
  [ -e "$directory/end" ] && IFS= read -r end <"$directory/end"
else end=dead; fi
echo "titogym:$end"
tail -c "+$((out + 1))" "$directory/out" 2>/dev/null | head -c "$piece" | base64 | tr -d '\n'; echo
tail -c "+$((err + 1))" "$directory/err" 2>/dev/null | head -c "$piece" | base64 | tr -d '\n'; echo
"""

# Everything but the API's own process, from which this script descends.
_KILL_ALL = r"""
chain=' '; pid=$$
while [ "${pid:-0}" -gt 0 ]; do
  chain="$chain$pid "; parent=0
  while read -r key value; do [ "$key" = PPid: ] && parent=$value; done <"/proc/$pid/status"
  pid=$parent
done 2>/dev/null
round=0
while [ "$round" -lt 20 ]; do
  alive=
  for directory in /proc/[0-9]*; do
    pid=${directory#/proc/}
    case $chain in *" $pid "*) continue ;; esac
    state= parent=
    while read -r key value rest; do
      case $key in State:) state=$value ;; PPid:) parent=$value ;; esac
    done <"$directory/status" 2>/dev/null
    [ -n "$state" ] && [ "$state" != Z ] && [ "$parent" != $$ ] || continue
    kill -KILL "$pid" 2>/dev/null && alive="$alive $pid"
  done
  [ -z "$alive" ] && exit 0
  round=$((round + 1))
  [ "$round" -gt 3 ] && sleep 0.1
done
echo "processes that will not die:$alive" >&2
exit 1
"""


@dataclass(frozen=True, slots=True)
class End:
    """How a command ended: its status, processes killed for want of memory meanwhile, and those it left."""

    status: int
    oom_kills: int = 0
    left: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request brought. `end` is None while the command runs."""

    end: End | None
    stdout: bytes
    stderr: bytes

    @property
    def last(self) -> bool:
        """Whether it brought the rest of what had been written."""
        return max(len(self.stdout), len(self.stderr)) < PIECE


KILLED = End(128 + 9)  # the supervisor has gone without a word


def begin(
    directory: str,
    secret: str,
    window: float,
    *,
    argv: Sequence[str],
    cwd: str,
    mark: str,
    stdin: str,
    stale: Sequence[str],
) -> str:
    """The shell line that starts a command and waits up to `window` s for its end. It may be repeated.

    `directory` is the command's own, those in `stale` are removed; `stdin` is the path of a file, or "" for
    no input.
    """
    words = [_turns(window), "0", "0", str(PIECE), _PREAMBLE + _SUPERVISOR, mark, cwd, *argv]
    clean = f"rm -rf {shlex.join(stale)}; " if stale else ""
    return (
        clean
        + "exec "
        + shlex.join([*_script(_BEGIN), directory, secret, stdin, _PREAMBLE + _REQUEST, *words])
    )


def follow(directory: str, window: float, offsets: tuple[int, int]) -> str:
    """The shell line that waits on, and fetches what was written beyond the offsets."""
    return "exec " + shlex.join(
        [*_script(_REQUEST), directory, _turns(window), *map(str, offsets), str(PIECE)]
    )


def parse(text: str, secret: str) -> Answer | None:
    """The answer to either, None where the text is none."""
    head, _, rest = text[max(0, text.find("titogym:")) :].partition("\n")
    if not head.startswith("titogym:"):
        return None
    out, _, err = rest.partition("\n")
    words = head.removeprefix("titogym:").split()
    end = KILLED if words else None  # unless it is signed, the supervisor did not write it
    if len(words) == 4 and words[0] == secret and all(word.lstrip("-").isdigit() for word in words[1:]):
        end = End(*map(int, words[1:]))
    try:
        return Answer(end, base64.b64decode(out), base64.b64decode(err.strip()))
    except ValueError:
        return None


def kill_command(mark: str) -> str:
    """The shell line that kills a command and all that it started."""
    return script(KILL_SCRIPT, mark)


def kill_all() -> str:
    return script(_KILL_ALL)


def argv(command: str | Sequence[str], env: Mapping[str, str]) -> list[str]:
    """The words for `env` that run a command as `Sandbox.exec` takes it."""
    words = [*SHELL, command] if isinstance(command, str) else command
    return [*(f"{name}={value}" for name, value in env.items()), *words]


def script(text: str, *words: str) -> str:
    """The shell line of a short script of ours with its arguments."""
    return "exec " + shlex.join([*_script(text), *words])


def _turns(window: float) -> str:
    return str(max(0, int(window / 0.05)))


def _script(text: str) -> list[str]:
    """The argv of a script of ours, to which its arguments are added.

    It finds the system's programs before those that an agent could put in their way; `path` is what the
    agent's commands are to have.
    """
    return ["/bin/sh", "-c", _PREAMBLE + text, "sh"]
