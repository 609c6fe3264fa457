from django.contrib.auth.models import AbstractUser
from django.db import models


class Member(AbstractUser):
    card = models.CharField(max_length=20, unique=True)
