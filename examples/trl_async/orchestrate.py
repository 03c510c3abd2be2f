"""The example from start to end: what the demo does, with TRL's trainer and a server that is there before the run."""

import json
import sys
from contextlib import ExitStack

from examples.demo import serving, settings, task
from examples.demo.characters import encode
from examples.demo.orchestrate import TRAINER_END_SECONDS, Demo, Options
from examples.demo.output import Output
from examples.demo.processes import Child, free_port
from examples.demo.rollouts import ServerClient
from examples.demo.screen import Screen
from examples.demo.settings import MODEL_NAME
from examples.demo.verdict import comparison_words, greedy_answers, prove_weights
from examples.fleet.replicas import script
from examples.trl_async.record import Proof, Record
from examples.trl_async.settings import LOG_HISTORY, TrainerSettings
from examples.trl_async.watch import LogEvents, ServerWatch

SERVED_SECONDS = 60.0


class TrlRun(Demo):
    """One run. ``record`` and ``verdict`` are filled while it goes on."""

    record: Record
    verdict: Proof

    def __init__(self, options: Options, output: Output, screen: Screen) -> None:
        super().__init__(options, output, screen)
        self.record = Record()
        self.verdict = Proof()

    def _run(self, children: ExitStack, settings: settings.TrainerSettings) -> None:
        with free_port() as port:
            told = TrainerSettings(**settings.to_dict(), notice=f"tcp://127.0.0.1:{port}")
        trainer = self._add(children, self._start_trainer(told))
        watch = ServerWatch()
        events = LogEvents(trainer, self.record, watch)
        self._screen.phase("warming up a 3 M parameter policy (supervised)")
        warm = self._until(events, "warm", [trainer])
        self.record.parameters, self.record.full_bytes_each = warm["parameters"], warm["bytes"]
        server, client = self._start_server(children, told)
        watch.client = client
        self.record.show(watch.fixed_words())
        trainer.say(json.dumps({"server": client.url}))
        self._screen.phase("AsyncGRPOTrainer: its worker asks the server, its weight syncs go through the bucket")
        done = self._until(events, "done", [trainer, server])
        self.record.versions = done["versions"]
        trainer.wait(TRAINER_END_SECONDS)
        trainer.stop()
        self._screen.phase("rescanning the weights that are served")
        client.request("GET", f"/delta_sync/wait?version={done['versions']}&timeout={SERVED_SECONDS}")
        self.record.pauses_ms.update(watch.look()["pauses_ms"])
        self.record.show(watch.fixed_words())
        prove_weights(self.verdict, client, self._bucket, told.checkpoint)
        history = json.loads((self._output.path / LOG_HISTORY).read_text())
        self.record.judge(self.verdict, self._options.steps, history)
        prompts = [encode(task.prompt_of(word)) for word in comparison_words(self._options.seed)]
        running = greedy_answers(client, prompts)
        client.close()
        server.stop()
        self._compare(children, told.checkpoint, prompts, running)

    def _start_trainer(self, settings: settings.TrainerSettings) -> Child:
        command = [sys.executable, "-m", "examples.trl_async.trainer", json.dumps(settings.to_dict())]
        log = self._output.path / "trainer.log"
        return Child("the trainer", command, log, environment=serving.trainer_environment(), talk=True)

    def _start_server(self, children: ExitStack, settings: TrainerSettings) -> tuple[Child, ServerClient]:
        self._screen.phase("starting vllm serve on the base checkpoint; there is no run yet")
        with free_port() as port:
            pass
        command = [
            *(script("delta-sync"), "serve", str(settings.base), "--port", str(port)),
            *("--bucket", settings.bucket, "--notice", settings.notice, *serving.SERVE_ARGUMENTS),
            # TRL asks for the model by the path that it was loaded from.
            *("--served-model-name", str(settings.base), MODEL_NAME),
        ]
        environment = serving.server_environment(self._cores.server)
        server = self._add(children, Child("the server", command, self._output.path / "server.log", environment))
        client = children.enter_context(ServerClient(f"http://127.0.0.1:{port}", MODEL_NAME))
        self._await_health(server, client)
        return server, client
