# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Reward functions that act as the reply requests, for calls that share a process. Run them only in a sandbox."""

import _thread
import code
import importlib.abc
import importlib.util
import os
import pickle
import runpy
import signal
import subprocess
import sys
import threading
import time
import types

from marin_rl.rewards import EvaluateResult, reward_function

CALLS = []
HELD = []


def raises(text):
    raise ValueError(f"cannot score {text}")


def allocates(text):
    return float(len(bytearray(10 * 2**30)))


def exits(text):
    os._exit(0)


def answers_an_object(text):
    return object()


def crashes(text):
    import ctypes

    return ctypes.string_at(0)


def is_killed(text):
    os.kill(os.getpid(), signal.SIGKILL)


def sleeps(text):
    time.sleep(float(text))
    return 1.0


def hangs_once(path):
    if os.path.exists(path):
        os.remove(path)
        time.sleep(1e6)
    return 1.0


def fails_together(text):
    """Fails in a process that has made another call."""
    CALLS.append(text)
    if len(CALLS) > 1:
        raise OSError("too many open files")
    return 1.0


def prints_much(text):
    print("x" * 30_000)
    return 1.0


def starts_a_low_level_thread(text):
    started = threading.Event()
    _thread.start_new_thread(lambda: (started.set(), time.sleep(1e6)), ())
    started.wait()
    return 1.0


def leaves_a_virtual_timer(text):
    signal.setitimer(signal.ITIMER_VIRTUAL, 1000)
    return 1.0


def uses_much(text):
    """Uses more CPU time than a shared process has, according to the clock."""
    time.process_time = lambda: 1e12
    return 1.0


def takes_long(text):
    """Ends after the last start of calls in a shared process, according to the clock."""
    time.monotonic = lambda: 1e12
    return 1.0


def prints(text):
    while True:
        print("x" * 1000)


def answers_much(text):
    return EvaluateResult(score=1.0, reason="x" * 10_000_000)


def answers_twice(text):
    os.write(3, b'{"results": [{"score": 1000000}]}\n')
    return 1.0


def answers_in_pieces(text):
    os.write(3, b'{"results": ')
    return 1.0


def closes_descriptors(text):
    os.closerange(0, 100)
    return 1.0


def leaves_a_thread(text):
    threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()
    return 1.0


def leaves_a_file(text):
    with open("left", "w") as file:
        file.write("behind")
    return 1.0


def leaves_a_file_open(text):
    HELD.append(os.open(os.devnull, os.O_RDONLY))
    return 1.0


def leaves_a_timer(text):
    signal.alarm(1000)
    return 1.0


def changes_its_folder(text):
    os.chdir("/")
    return 1.0


def removes_its_folder(text):
    os.rmdir(os.getcwd())
    return 1.0


def ends_a_thread(text):
    threads = [threading.Thread(target=CALLS.copy) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 1.0


def removes_its_file(text):
    leaves_a_file(text)
    os.remove("left")
    return 1.0


def imports(text):
    import fractions

    import lazy_helper

    lazy_helper.Record(lazy_helper.Pair(1.0, 2.0).second)
    return float(fractions.Fraction(1, 2))


def with_exec(text):
    space = {}
    exec(text, space)
    return space["score"]


def with_eval(text):
    return eval(f"[exec({text!r}, globals()), score][1]")


def with_a_code_object(text):
    exec(compile(text, "<frozen importlib._bootstrap>", "exec"), globals())
    return globals()["score"]


def with_a_function(text):
    types.FunctionType(compile(text, "<string>", "exec"), globals())()
    return globals()["score"]


def with_an_interpreter(text):
    interpreter = code.InteractiveInterpreter()
    interpreter.runsource(text, symbol="exec")
    return interpreter.locals["score"]


def in_a_thread(text):
    thread = threading.Thread(target=exec, args=(text, globals()))
    thread.start()
    thread.join()
    return globals()["score"]


def written(text):
    with open("solution.py", "w") as file:
        file.write(text)
    return os.path.abspath("solution.py")


def from_a_file(text):
    return runpy.run_path(written(text))["score"]


def as_a_module(text):
    spec = importlib.util.spec_from_file_location("solution", written(text))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.score


def on_the_path(text):
    sys.path.insert(0, os.path.dirname(written(text)))
    import solution

    return solution.score


class StringLoader:
    """Finds and loads a module that consists of a text."""

    def __init__(self, text):
        self.text = text

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self) if name == "solution" else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        exec(self.text, module.__dict__)


def through_a_loader(text):
    sys.meta_path.append(StringLoader(text))
    import solution

    return solution.score


class SourceLoader(importlib.abc.SourceLoader):
    """Loads a text in the way of a source file."""

    def __init__(self, text):
        self.text = text

    def get_filename(self, name):
        return "<frozen importlib._bootstrap>"

    def get_data(self, path):
        return self.text.encode()


def through_a_source_loader(text):
    module = types.ModuleType("solution")
    module.__spec__ = importlib.util.spec_from_loader("solution", None)
    SourceLoader(text).exec_module(module)
    return module.score


def in_a_thread_without_frames(text):
    space = {}
    _thread.start_new_thread(exec, (text, space))
    while "score" not in space:
        time.sleep(0.001)
    return space["score"]


class Reduced:
    def __init__(self, text):
        self.text = text

    def __reduce__(self):
        return exec, (self.text,)


def from_a_pickle(text):
    pickle.loads(pickle.dumps(Reduced(text)))
    return 1.0


def from_a_library(text):
    import ctypes

    ctypes.CDLL(None)
    return 1.0


def in_a_program(text):
    return float(subprocess.run(["/bin/true"], check=True).returncode)


def in_a_fork(text):
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return 1.0


def acts(messages, ground_truth, **kwargs):
    """Return the number in the reply, or the result of the function that it names, with the rest as argument."""
    name, _, text = messages[-1]["content"].partition(" ")
    action = ACTIONS.get(name)
    result = float(name) if action is None else action(text)
    if type(result) in (EvaluateResult, object):
        return result
    return EvaluateResult(score=result, reason=str(os.getpid()))


ACTIONS = {name: value for name, value in globals().items() if isinstance(value, types.FunctionType)}
# One reward function for each action, because a function that may not share processes never does so again in a run.
globals().update(
    {f"acts_{name}": reward_function(acts) for name in (*ACTIONS, *map("writes_then_{}".format, range(4)))}
)
numbers = reward_function(acts)
numbers_alone = reward_function(own_process=True)(acts)


@reward_function
def counts(messages, ground_truth, **kwargs):
    CALLS.append(1)
    return float(len(CALLS))


@reward_function
def scores_after(messages, ground_truth, action, text, **kwargs):
    """Runs an action before it scores, like another call in the same process."""
    ACTIONS[action](text)
    return float("1")


@reward_function
def changes_its_options(messages, ground_truth, bonus, **kwargs):
    bonus["score"] += 1.0
    return bonus["score"]


@reward_function
def names_metrics(messages, ground_truth, **kwargs):
    reply = messages[-1]["content"]
    return EvaluateResult(score=1.0, metrics={f"{reply}_{index}": 1.0 for index in range(40)})
