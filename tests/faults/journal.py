"""Files that survive crashes: the intentions of producers and the runs of handlers.

One line per fact, appended in one write and synced before the process continues.
"""

import json
import os
import time
from collections import defaultdict
from pathlib import Path

OK, FAIL, UNKNOWN = "ok", "fail", "unknown"
HANDLERS = "EVENTBUS_TEST_JOURNAL"


class Journal:
    def __init__(self, path):
        self.path = Path(path)

    def write(self, **facts):
        self.write_all([facts])

    def write_all(self, several):
        """Append all facts in one write."""
        known = {"pid": os.getpid(), "at": time.monotonic()}
        lines = "".join(json.dumps({**facts, **known}) + "\n" for facts in several)
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(file, lines.encode())
            os.fsync(file)
        finally:
            os.close(file)

    def read(self):
        """The facts in order. A line that a crash cut short is ignored."""
        if not self.path.exists():
            return []
        complete = [line for line in self.path.read_text().splitlines(True) if line.endswith("\n")]
        return [json.loads(line) for line in complete]


class ProducerJournal(Journal):
    """A journal of a producer: intentions before a transaction, outcomes after it."""

    def intend(self, event_id, key=None):
        self.write(event=str(event_id), key=key, intent=True)

    def outcome(self, event_id, outcome):
        self.write(event=str(event_id), outcome=outcome)

    def intend_all(self, event_ids):
        self.write_all({"event": str(each), "key": None, "intent": True} for each in event_ids)

    def outcomes_of(self, event_ids, outcome):
        self.write_all({"event": str(each), "outcome": outcome} for each in event_ids)

    def outcomes(self):
        """The outcome of each event; an event without a recorded outcome is unknown."""
        found = {}
        for fact in self.read():
            found[fact["event"]] = fact.get("outcome", UNKNOWN)
        return found

    def transactions(self):
        """The events of each transaction, whose intentions were written together."""
        found = defaultdict(set)
        for fact in self.read():
            if fact.get("intent"):
                found[fact["pid"], fact["at"]].add(fact["event"])
        return list(found.values())

    def with_outcome(self, outcome):
        return {event for event, its in self.outcomes().items() if its == outcome}


class HandlerJournal(Journal):
    """``start`` and ``end`` of every run of a handler."""

    @classmethod
    def of_this_process(cls):
        path = os.environ.get(HANDLERS)
        return cls(path) if path else None

    def note(self, what, envelope):
        claim = envelope._event.claim
        self.write(
            what=what,
            event=str(envelope.id),
            handler=envelope.handler_name,
            key=envelope.key,
            row=envelope._event.row_id,
            attempt=envelope.attempt,
            token=str(claim.token),
            worker=str(claim.worker_id),
        )

    def runs_by_key(self):
        """The runs of each key by start time: (event, row, start, end or None, worker)."""
        open_runs, runs = {}, defaultdict(list)
        for fact in self.read():
            run = (fact["event"], fact["token"], fact["pid"])
            if fact["what"] == "start":
                open_runs[run] = entry = [
                    fact["event"],
                    fact["row"],
                    fact["at"],
                    None,
                    fact["worker"],
                ]
                runs[fact["key"]].append(entry)
            elif run in open_runs:
                open_runs.pop(run)[3] = fact["at"]
        return runs
