from django.http import JsonResponse
from members.models import Member

from .models import Book, Loan
from .tasks import remind


def _lend(book):
    loan = Loan.objects.create(book_id=book, member=Member.objects.get())
    return loan, remind.delay(loan.pk)


def lend(request, book):
    loan, result = _lend(book)
    return JsonResponse({"loan": loan.pk, "task": result.id})


def lend_and_fail(request, book):
    """The transaction of the request is rolled back."""
    _, result = _lend(book)
    raise LookupError(result.id)


async def read(request, book):
    """No transaction: ATOMIC_REQUESTS is not for these."""
    return JsonResponse({"title": (await Book.objects.aget(pk=book)).title})


read._non_atomic_requests = {"default"}
