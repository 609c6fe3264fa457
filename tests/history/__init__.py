"""Tests of histories, and of the judge who reads them."""
