"""A trainer that signs and announces: ``python -m tests.e2e.siege.trainer FAMILY OPTIONS``.

OPTIONS is JSON: the arguments of ``Publisher``. Each line on standard input is a command, answered by a line of JSON:
``publish`` trains a step and publishes it: version, fingerprint, and the seconds that the training loop stood still.
"""

import json
import sys
import time

from tests.support.tiny import make_model, train_steps


def main(family: str, options: str) -> None:
    from trainer_side import Publisher
    from vllm_delta_sync import open_run

    model = make_model(family, seed=5)
    steps = train_steps(model, lr=3e-5)
    arguments = json.loads(options)
    with Publisher(model, **arguments) as publisher:
        print(json.dumps({"run": publisher.run, "notice": publisher.notice_address}), flush=True)
        for number, _ in enumerate(sys.stdin, start=1):
            next(steps)
            started = time.perf_counter()
            result = publisher.publish(step=number)
            stood_still = time.perf_counter() - started
            publisher.flush()
            fingerprint = open_run(arguments["bucket"]).manifest(int(result.version or 0)).fingerprint
            answer = {"version": result.version, "fingerprint": fingerprint, "seconds": stood_still}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
