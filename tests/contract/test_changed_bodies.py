"""Bodies that were changed on their way, over real HTTP to a real coordinator: refused, and nothing is done."""

import hashlib

import httpx

from api.content_digest import FIELD, agrees, content_digest
from api.payload import MEDIA_TYPE
from tests.contract.by_hand import WAIT_S, RunByHand, SiteByHand, problem


def flipped(body: bytes) -> bytes:
    """With one bit changed in its last byte, which is one of a contribution's values."""
    return body[:-1] + bytes([body[-1] ^ 1])


def send(site: SiteByHand, method: str, path: str, body: bytes, sent: bytes, kind: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {site.seat}", "Content-Type": kind, FIELD: content_digest(body)}
    return httpx.request(method, f"{site.url}{path}", content=sent, headers=headers, timeout=60)


def test_a_contribution(patient):
    run = RunByHand(patient)
    first, second = run.sites
    body = first.message(1)
    answer = send(first, "PUT", first.path(1), body, flipped(body), MEDIA_TYPE)
    problem(answer, 422, "digest_mismatch")
    assert agrees(answer.headers[FIELD], answer.content)
    assert f"waiting for 2 of 2 sites: {first.name}" in run.view.reason
    assert send(first, "PUT", first.path(1), body, body, MEDIA_TYPE).status_code == 202
    assert second.contribute(1, wait=WAIT_S) is not None
    (entry,) = run.admin.log(run.id, "west", 1).items
    digests = {line["site"]: line["digest"] for line in entry["contributors"]}
    assert digests[first.name] == hashlib.sha256(body).hexdigest()
    assert entry["refusals"] == []


def test_a_blob(patient):
    site = RunByHand(patient, ("west",)).sites[0]
    blob = b"the bytes of a blob of which one is changed"
    path = f"/v1/blobs/{hashlib.sha256(blob).hexdigest()}"
    problem(send(site, "PUT", path, blob, flipped(blob), "application/octet-stream"), 422, "digest_mismatch")
    assert send(site, "HEAD", path, b"", b"", "application/octet-stream").status_code == 404
    assert site.ranks.put_blob(blob) == hashlib.sha256(blob).hexdigest()
    assert site.ranks.get_blob(hashlib.sha256(blob).hexdigest()) == blob


def test_json(patient):
    run = RunByHand(patient, ("west",))
    site = run.sites[0]
    body = b'{"position": {"seq": 0, "hash": "' + run.view.regions[0].head.hash.encode() + b'"}, "reason": "aaa"}'
    path = f"/v1/runs/{run.id}/regions/west/steps/1/abstentions/{site.name}"
    problem(send(site, "PUT", path, body, body.replace(b"aaa", b"aab"), "application/json"), 422, "digest_mismatch")
    problem(send(site, "PUT", path, body, body.replace(b"}", b"]"), "application/json"), 422, "digest_mismatch")
    assert run.view.step == 0
    assert send(site, "PUT", path, body, body, "application/json").status_code == 200
