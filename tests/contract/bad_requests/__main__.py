"""Prints the page of bad requests."""

import sys

from tests.contract.bad_requests.page import page

sys.stdout.write(page())
