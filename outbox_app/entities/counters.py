"""The names of the counters of commands."""

#: Commands of entities that were recorded; rejected ones by code; repeated attempts; batches by
#: size, and by the duration of their transaction, in the buckets of ``delay``.
COMMANDS, REJECTED, CODE, CONFLICTS = "commands", "rejected_commands", "code", "command_conflicts"
BATCH_SIZE, COMMIT_TIME = "command_batch_size", "command_commit_time"
#: Commands of routed types that another server has passed on, and commands that were executed by a
#: server that does not lead their entity.
ROUTED, ROUTE = "routed_commands", "route"
PASSED, ELSEWHERE = "passed_on", "elsewhere"
#: How many commands wait in a process (a sample).
WAITING = "commands_waiting"

#: All of them.
NAMES = (COMMANDS, REJECTED, CONFLICTS, ROUTED, BATCH_SIZE, COMMIT_TIME, WAITING)
