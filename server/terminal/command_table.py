"""The commands of `facet`, as its help lists them. Their modules are imported when they are called."""

from __future__ import annotations

USAGE = """usage: facet COMMAND [options]; facet COMMAND --help tells more

  facet serve [MODEL...]          serve models over HTTP; without a name, the built-in demo model
  facet run MODEL                 serve a model for one conversation in this terminal
  facet embed MODEL [TEXT...]     print vectors of texts; with --url a server computes them
  facet pull MODEL                download a model
  facet list                      list the models that were downloaded, and those of a server that runs
  facet keys add|list|remove      edit the file of API keys

With a server that runs:
  facet chat                      talk to its model
  facet complete                  continue a text
  facet decide FILE               answer typed questions about a text, with probabilities
  facet calibrate DATA -o FILE    find by how much these probabilities are too sure
  facet models                    list its models
  facet load|unload MODEL         load or unload one of several models
  facet run-batch -i IN -o OUT    answer a file of requests; it can start a server of its own
  facet launch AGENT              start claude-code, codex or opencode with it
  facet bench serve               measure its speed under load

On this machine:
  facet doctor                    check what it has and lacks for serving models
  facet prove [MODEL...]          check that it computes what the models' authors' code does
  facet collect-env               the same with versions, for a bug report
  facet models --suggest          models that fit it
  facet completion SHELL          what has bash, zsh or fish complete commands and flags
  facet version
"""

TERMINAL = {
    "run": "server.terminal.chat",
    "embed": "server.offline.embed_command",
    "pull": "server.terminal.hub_cache",
    "list": "server.terminal.hub_cache",
    "chat": "server.terminal.chat",
    "complete": "server.terminal.chat",
    "decide": "server.terminal.decide",
    "calibrate": "server.terminal.calibrate",
    "models": "server.terminal.models",
    "load": "server.terminal.models",
    "unload": "server.terminal.models",
    "run-batch": "server.terminal.run_batch",
    "launch": "server.terminal.launch",
    "doctor": "server.terminal.doctor",
    "prove": "server.terminal.proving.command",
    "collect-env": "server.terminal.doctor",
    "keys": "server.terminal.keys",
    "completion": "server.terminal.completion",
}
"""The commands of `facet` beside `serve`, `bench` and `version`, and the modules whose `run` they call."""
