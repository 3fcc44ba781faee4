// GET requests to the coordinator that served this page, with the tab's token. URLs are relative: a path prefix works.

const KEY = "isthmus-token";
const TIMEOUT_MS = 10_000;

export const token = {
  get: () => sessionStorage.getItem(KEY),
  keep: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

export class Refused extends Error {} // the token is not accepted
export class NoAnswer extends Error {} // nothing, or something that is not the coordinator
export class Problem extends Error {} // the coordinator's own answer, with the reason
export class Missing extends Problem {} // 404

export async function get(path, signal) {
  let response, body;
  try {
    response = await fetch(path, {
      headers: { Accept: "application/json", Authorization: `Bearer ${token.get()}` },
      signal: AbortSignal.any([signal, AbortSignal.timeout(TIMEOUT_MS)]),
      cache: "no-store",
    });
    body = /json/.test(response.headers.get("content-type")) ? await response.json() : null;
  } catch (error) {
    signal.throwIfAborted();
    throw new NoAnswer(error.message);
  }
  const { status } = response;
  if (response.ok && body) return body;
  if (status === 401) throw new Refused(body?.detail ?? "The coordinator does not know this token.");
  if (status === 403) throw new Refused(body?.detail ?? "This token may not read runs; use an admin or observer token.");
  if (!body || [502, 503, 504].includes(status)) throw new NoAnswer(body?.detail ?? `HTTP ${status}`);
  throw new (status === 404 ? Missing : Problem)(body.detail ?? `HTTP ${status}`);
}
