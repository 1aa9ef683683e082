"""The groups of options, in the order in which `serve --help=all` and docs/options.md show them."""

MODEL = "Model"
ADAPTERS = "Adapters"
MEMORY = "Device and memory"
WORKERS = "Workers and replicas"
SCHEDULER = "Scheduler"
TEXT = "Tokenizer and chat template"
MEDIA = "Media in requests"
ANSWERS = "Answers"
HTTP = "HTTP"
REPORTS = "Times and traces"
ACCESS = "Access and fairness"
PLUGINS = "Plug-ins"
LOGS = "Process and logs"

GROUPS = (
    *(MODEL, ADAPTERS, MEMORY, WORKERS, SCHEDULER, TEXT, MEDIA, ANSWERS, HTTP, REPORTS, ACCESS, PLUGINS),
    LOGS,
)
