"""The worker notes each run of a task, successful or not, in the table ``Execution``.

The demo counts lost, leaked and repeated runs from these notes. A real shop would not need them.
"""

from celery.signals import task_postrun

from .models import Execution


@task_postrun.connect(dispatch_uid="example_project.shop.notes")
def note_execution(task_id, task, args, state, **kwargs):
    """Write one row about the run that has just ended."""
    if task.name.startswith(f"{__package__}."):
        Execution.objects.create(
            task_id=task_id,
            task=task.name.rpartition(".")[2],
            subject=str(args[0]),
            state=state,
        )
