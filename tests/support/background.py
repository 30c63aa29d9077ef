"""Processes as a script, `nohup` or cron starts them in the background."""


def in_the_background(*command: str) -> list[str]:
    """`command` as a process that inherits that SIGINT is ignored. By a shell: code of ours between fork and exec may
    hang beside gRPC."""
    return ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *command]
