"""Objects in other processes, perhaps of another environment: requests and answers are lines of JSON over pipes.

The one who asks waits for the answer, so that of all processes only one works at a time; or tells several, which then work
together, and waits for all their answers.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Self


class WorkerError(Exception):
    """A worker died or refused; the reason is one line."""


class Remote:
    """An object served by `serve` in a process of its own, which ends with the `with` block.

    Args:
        name: for messages.
        command: starts the process.
        environment: variables added to those of this process.

    Raises:
        WorkerError: it cannot be started.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
            )
        except OSError as error:
            raise WorkerError(f"cannot start {name}: {error}") from None

    def ask(self, method: str, **arguments: Any) -> Any:
        """Call a method with keyword arguments that JSON can hold and wait for its result.

        Raises:
            WorkerError: the method raised, or the process died.
        """
        self.tell(method, **arguments)
        return self.answer()

    def tell(self, method: str, **arguments: Any) -> None:
        """Call a method as `ask` does, but do not wait: for processes that work together. `answer` returns what it returned."""
        assert self._process.stdin is not None
        self._method = method
        with contextlib.suppress(BrokenPipeError):  # it died, and `answer` says so
            self._process.stdin.write(json.dumps({"method": method, "arguments": arguments}) + "\n")
            self._process.stdin.flush()

    def answer(self) -> Any:
        """Wait for the result of the method that was told last.

        Raises:
            WorkerError: the method raised, or the process died.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(
                f"{self.name} ended with status {self._process.wait()} at '{self._method}'; see its messages above"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self.name}, {self._method}: {answer['error']}")
        return answer["result"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def serve(served: object) -> None:
    """Answer requests on stdin by calling the methods of `served`, until there are no more; what is printed goes to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": getattr(served, request["method"])(**request["arguments"])}
        except Exception as error:  # the other side raises it
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
