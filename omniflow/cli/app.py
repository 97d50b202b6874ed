"""The commands. What they raise as an OmniflowError becomes one line on stderr and exit code 1."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import anyio
import msgspec
import typer
import typer.core
from rich.console import Console
from rich.text import Text

from omniflow import __version__
from omniflow.cli import clients
from omniflow.cli.chosen import Chosen, choose, layers_of, needs_of, refuse_what_lacks
from omniflow.cli.doctor import examine, examine_graph, findings_table
from omniflow.cli.machine import memory_bytes, num_cores, open_more_files, this_machine
from omniflow.cli.models import models_table, needs_everywhere, server_needs, weights_named
from omniflow.cli.tables import absent_lines, cluster_text, output_console, plan_view, settings_table
from omniflow.config import configure, set_layer
from omniflow.errors import ConfigError, OmniflowError, StartError, WeightsError
from omniflow.planner import Cluster, Plan, cluster_named
from omniflow.planner import plan as make_plan
from omniflow.process import runs_on_uvloop
from omniflow.topology import reachable_outputs
from omniflow.visualize import draw_graph, draw_plan
from omniflow.weights import fetch

app = typer.Typer(
    name="omniflow",
    help="Serve omni-modal models as a typed dataflow graph.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
models = typer.Typer(help="The weights that graphs need: list them, fetch them.")
app.add_typer(models, name="models")

GraphName = Annotated[
    str,
    typer.Argument(metavar="GRAPH", help="A graph by name (ming_omni), or a file: path/to/my_graph.py[:attribute]."),
]
Profile = Annotated[str | None, typer.Option(help="Profile of the graph; the first one is the default.")]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="CHECKPOINT",
        help="The checkpoint to serve: a folder, or hf:owner/repo[@revision]. Its config.json chooses the profile. "
        "(The model id that clients see is server.model.)",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting: stage.field, runtime.x or server.x. Repeatable."),
]
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Settings from a TOML file.")]
SingleProcess = Annotated[bool, typer.Option("--single-process", help="Run all stages in this process, on the CPU.")]
ClusterName = Annotated[
    str | None, typer.Option(metavar="NAME", help="Plan for cpu, 1xh200, 8xh200, ...; else for this machine.")
]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and more of the log.")] = False,
) -> None:
    """Serve omni-modal models as a typed dataflow graph."""
    if version:
        typer.echo(f"omniflow {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def run(
    graph: GraphName,
    profile: Profile = None,
    model: Model = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (8000); 0 takes a free one.")] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="Let in only callers with such a key. Repeatable. Others on this machine can "
            "read a command line: OMNIFLOW_API_KEYS=KEY,... is better.",
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Web pages that may call: https://chat.example. Repeatable."),
    ] = None,
    ssl_certfile: Annotated[str | None, typer.Option(metavar="FILE", help="Certificate chain: speak TLS.")] = None,
    ssl_keyfile: Annotated[str | None, typer.Option(metavar="FILE", help="Its key, where it is not in there.")] = None,
    log_format: Annotated[str | None, typer.Option(metavar="text|json", help="Form of the log on stderr.")] = None,
    set_: Settings = None,
    config: ConfigFile = None,
    single_process: SingleProcess = False,
    record: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Record each request there, with all that it sends.")
    ] = None,
    record_max: Annotated[int, typer.Option(min=1, help="Recordings to keep there; the oldest go.")] = 1000,
    record_max_bytes: Annotated[str, typer.Option(metavar="SIZE", help="What they may take together.")] = "1 GiB",
) -> None:
    """Start a graph and serve it over HTTP, OpenAI-compatible. Ctrl-C or SIGTERM drains it."""
    # Each stage computes in its own process, and they share the cores. Before a graph file loads any library.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Of the command, not of a Runtime: that may be in a program of others.
    open_more_files()
    try:
        from omniflow.cli import replaying, serving
    except ImportError as error:
        raise ConfigError(f"serving needs {error.name}: run `pip install 'omniflow[server]'`") from error
    options = {
        "host": host,
        "port": port,
        "api_keys": api_key,
        "cors_origins": cors_origin,
        "ssl_certfile": ssl_certfile,
        "ssl_keyfile": ssl_keyfile,
        "log_format": log_format,
    }
    layers = layers_of(config, set_ or [], {f"server.{name}": value for name, value in options.items()})
    chosen = choose(graph, profile, layers, model)
    serving.refuse_what_cannot_be_served(chosen.configured.server)
    serving.write_log(chosen.configured.server)
    cluster = msgspec.structs.replace(this_machine(), single_process=single_process)
    plan = make_plan(chosen.spec, cluster, chosen.configured.runtime)
    refuse_what_lacks(chosen.spec)
    console = output_console()
    keep = replaying.Keep(record, record_max, record_max_bytes) if record else None
    with replaying.recorder_of(keep, plan, graph, chosen.layers) as recorder:
        console.print(_headline(chosen, cluster))
        console.print(plan_view(plan))
        if record:
            note = f"recording requests, with all that they send, to {record}"
            console.print(Text(note, style="yellow"), soft_wrap=True)
        console.print()
        fetch(need.weights for need in needs_of(chosen.spec))
        _fetch_for_server(plan, console)
        anyio.run(
            serving.serve_graph,
            plan,
            chosen.configured.runtime,
            chosen.configured.server,
            console,
            recorder,
            backend_options={"use_uvloop": runs_on_uvloop(chosen.configured.runtime)},
        )


for _command in (clients.chat, clients.say, clients.transcribe):
    app.command()(_command)
app.add_typer(clients.bench, name="bench")


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A recording that `run --record` wrote.")],
    graph: Annotated[str | None, typer.Option(metavar="GRAPH", help="Another graph than the recorded one.")] = None,
    set_: Settings = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="An option of the request to change: seed, speed, ... Repeatable."),
    ] = None,
    run_all: Annotated[
        bool, typer.Option("--all", help="Run also the stages whose output depends on time, instead of giving it.")
    ] = False,
    single_process: SingleProcess = False,
) -> None:
    """Run a recorded request again, and name the first edge that differs. Exit code 1 if one does."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from omniflow.cli import replaying

    cluster = msgspec.structs.replace(this_machine(), single_process=single_process)
    changes = replaying.Changes(graph, set_layer(set_ or []), tuple(option or ()), run_all)
    if not replaying.replay_file(file, changes, cluster, output_console()):
        raise typer.Exit(1)


@app.command()
def check(
    graph: GraphName, profile: Profile = None, model: Model = None, set_: Settings = None, config: ConfigFile = None
) -> None:
    """Prove that a graph can work: every port, every profile, every setting. Loads no weights."""
    chosen = choose(graph, profile, layers_of(config, set_ or [], {}), model)
    spec = chosen.spec
    console = output_console()
    console.print(f"{spec.name} is sound ({len(spec.stages)} stages, {len(spec.all_edges)} edges)")
    for name, declared in chosen.graph.profiles.items():
        configure(chosen.graph.spec(name))
        console.print(Text.assemble("  profile ", (name, "bold"), f": {declared.why}"))
    for entry in spec.inputs:
        outputs = ", ".join(reachable_outputs(spec, entry.source_port)) or "nothing under this profile"
        console.print(Text.assemble("  input ", (entry.source_port, "bold"), f" gives {outputs}"))
    for line in absent_lines(spec.absent):
        console.print(Text.assemble("  ", line))


class _Explain(typer.core.TyperCommand):
    """`--config` may stand without a FILE, where none follows it: typer has no option with an optional value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer, with a lone `--config` made `--config=`."""
        alone = [arg == "--config" and after.startswith("-") for arg, after in zip(args, [*args[1:], "-"], strict=True)]
        return super().parse_args(ctx, ["--config=" if lone else arg for arg, lone in zip(args, alone, strict=True)])


@app.command(cls=_Explain)
def explain(
    graph: GraphName,
    profile: Profile = None,
    model: Model = None,
    cluster: ClusterName = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON (schema: docs/explain.md).")] = False,
    set_: Settings = None,
    config: Annotated[
        str | None,
        typer.Option(metavar="[FILE]", help="Show every setting and where it comes from. FILE: settings in TOML."),
    ] = None,
) -> None:
    """Show where each stage would run, how each edge would travel, and why. Starts nothing."""
    chosen = choose(graph, profile, layers_of(Path(config) if config else None, set_ or [], {}), model)
    placed_on = _cluster(cluster)
    plan = make_plan(chosen.spec, placed_on, chosen.configured.runtime)
    if as_json:
        typer.echo(msgspec.json.format(plan.to_json(), indent=2))
        return
    console = output_console()
    console.print(_headline(chosen, placed_on))
    console.print(plan_view(plan))
    settings = settings_table(chosen.configured, every=config is not None)
    if settings is not None:
        console.print()
        console.print(settings)


@app.command()
def draw(
    graph: GraphName,
    profile: Profile = None,
    hosts: Annotated[bool, typer.Option("--hosts", help="Draw the plan: hosts around their stages.")] = False,
    cluster: ClusterName = None,
) -> None:
    """Print a graph as a Mermaid flowchart."""
    chosen = choose(graph, profile, [])
    if hosts or cluster is not None:
        typer.echo(draw_plan(make_plan(chosen.spec, _cluster(cluster))))
    else:
        typer.echo(draw_graph(chosen.spec))


@models.command("list")
def list_models(
    graph: Annotated[str | None, typer.Argument(metavar="[GRAPH]", help="Only what this graph needs.")] = None,
    profile: Profile = None,
    model: Model = None,
) -> None:
    """Show the weights that graphs need, and which of them are on this machine."""
    if model is not None and graph is None:
        raise ConfigError("--model is for the stages of a graph; name it, too")
    needs = needs_of(choose(graph, profile, [], model).spec) if graph else needs_everywhere()
    output_console().print(models_table(needs) if needs else "no weights are needed")


@models.command("fetch")
def fetch_models(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="[GRAPH|NAME]...", help="Graphs, names of weights, or hf:owner/repo[@revision]."),
    ] = None,
    profile: Profile = None,
) -> None:
    """Fetch the weights of graphs (or single ones) that are not on this machine yet.

    Without a name: all that have one of their own. What comes from the hub has to be named: it can be 200 GB.
    """
    console = output_console()
    for weights in weights_named(what or [], profile):
        (folder,) = fetch([weights])
        console.print(Text.assemble((weights.name, "bold"), f"  {folder}"), soft_wrap=True)


@app.command()
def doctor(
    graph: Annotated[str | None, typer.Argument(metavar="[GRAPH]", help="Look at what this graph needs, too.")] = None,
    profile: Profile = None,
    model: Model = None,
    set_: Settings = None,
    config: ConfigFile = None,
) -> None:
    """Look at this machine and this installation, and say what each finding means."""
    if graph is None and (profile or model or set_ or config):
        what = "--profile, --model, --set and --config are for a graph"
        raise ConfigError(f"{what}; name it, too: omniflow doctor GRAPH --profile NAME")
    chosen = choose(graph, profile, layers_of(config, set_ or [], {}), model) if graph else None
    findings = examine() + (examine_graph(chosen, this_machine()) if chosen else [])
    output_console().print(findings_table(findings))
    if any(finding.verdict == "missing" for finding in findings):
        raise typer.Exit(1)


def _cluster(name: str | None) -> Cluster:
    if name is None:
        return this_machine()
    if name == "cpu":
        return cluster_named(name, cpu_cores=num_cores(), memory_bytes=memory_bytes())
    return cluster_named(name)


def _fetch_for_server(plan: Plan, console: Console) -> None:
    """What only some calls need does not keep the others from being served."""
    for need in server_needs(plan):
        try:
            fetch([need.weights])
        except WeightsError as error:
            note = f"{', '.join(need.stages)} will find no turns by itself: {error}"
            console.print(Text(note, style="yellow"), soft_wrap=True)


def _headline(chosen: Chosen, cluster: Cluster) -> Text:
    """Which graph, where, under which profile and why."""
    spec = chosen.spec
    text = Text.assemble((spec.name, "bold"), f" on {cluster_text(cluster)}\n{chosen.why}\n")
    if spec.profile is not None:
        text.highlight_words([f"profile {spec.profile.name}"], style="bold")
    return text


def run_command_line(arguments: list[str] | None = None) -> int:
    """Run one command; returns its exit code: 0, 1 for an error, 2 for a wrong command line, 130 for Ctrl-C."""
    given = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in given
    # Before the command: it stands for all of them, so it may come after their names as well.
    ordered = ["--debug", *(argument for argument in given if argument != "--debug")] if debug else given
    logging.basicConfig(level=logging.INFO if debug else logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        code = app(ordered, prog_name="omniflow", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "omniflow"
        _say_error(f"{error.format_message().rstrip('.')}; see `{command} --help`")
        return error.exit_code
    except typer.Abort:
        return 130
    except BrokenPipeError:
        # The reader of our output (`| head`) has gone; the interpreter must not fail when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OmniflowError as error:
        return _failed(error, debug)
    except Exception as error:  # noqa: BLE001 - the last boundary: a bug of ours is one line too, unless asked for more
        return _failed_by_bug(error, debug)


def _failed(error: OmniflowError, debug: bool) -> int:
    from_process = error.detail if isinstance(error, StartError) else ""
    if debug and from_process:
        typer.echo(from_process, err=True)
    elif debug:
        traceback.print_exception(error)
    _say_error(f"{error} (--debug shows the traceback)" if from_process and not debug else str(error))
    return 1


def _failed_by_bug(error: Exception, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    _say_error(f"{type(error).__name__}: {error}; this is a bug in omniflow: please report it with what --debug shows")
    return 1


def _say_error(text: str) -> None:
    line = " ".join(text.split())
    output_console(stderr=True).print(Text.assemble(("error: ", "bold red"), line), soft_wrap=True)
