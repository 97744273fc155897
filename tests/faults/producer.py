"""A producer of transactions with several events each, and a journal of their outcomes.

    python -m tests.faults.producer JOURNAL --seed 7 --keys 50

One transaction in ten is rolled back on purpose. The producer continues after database errors,
until it has published all its events or gets SIGTERM.
"""

import argparse
import random
import signal
import time

import django

TROUBLE_WAIT = 0.05


class Changed(Exception):
    """Raised to roll back a transaction on purpose."""


def main():
    options = arguments()
    django.setup()
    from django.db import connection

    from tests.faults.journal import FAIL, OK, UNKNOWN, ProducerJournal

    journal, rng = ProducerJournal(options.journal), random.Random(options.seed)
    stopping = []
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(1))
    published = 0
    while published < options.events and not stopping:
        transaction = Transaction(journal, rng, options)
        try:
            transaction.run()
        except Changed:
            outcome = FAIL
        except Exception as error:
            print(repr(error), flush=True)
            # The result of a COMMIT that was sent and not answered is unknown.
            outcome = UNKNOWN if transaction.committing else FAIL
            connection.close()
            time.sleep(TROUBLE_WAIT)
        else:
            outcome = OK
            published += len(transaction.events)
        journal.outcomes_of(transaction.events, outcome)
        time.sleep(options.pause)


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("journal")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--events", type=float, default=float("inf"))
    parser.add_argument("--size", type=int, default=5, help="events per transaction")
    parser.add_argument("--keys", type=int, default=0, help="0: half of the events get no key")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between transactions")
    parser.add_argument("--name", default="p", help="its keys are its own")
    return parser.parse_args()


class Transaction:
    def __init__(self, journal, rng, options):
        self.journal, self.rng, self.options = journal, rng, options
        self.events = []
        self.committing = False

    def run(self):
        from django.db import transaction

        from django_eventbus import publish

        with transaction.atomic():
            for _ in range(self.options.size):
                self.events.append(publish("fault.effect", {}, key=self.key()).event_id)
            self.journal.intend_all(self.events)
            if self.rng.random() < 0.1:
                raise Changed
            self.committing = True

    def key(self):
        """A key for every second event, if the producer uses keys."""
        if not self.options.keys or self.rng.random() < 0.5:
            return None
        return f"{self.options.name}{self.rng.randrange(self.options.keys)}"


if __name__ == "__main__":
    main()
