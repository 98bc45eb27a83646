"""What `helm test` runs: asks the server at $URL whether it is ready, for its model's name, and for one completion."""

import os
import sys

import httpx

key = os.environ.get("KEYS", "").partition(",")[0]
headers = {"Authorization": f"Bearer {key}"} if key else {}
with httpx.Client(base_url=os.environ["URL"], headers=headers, timeout=120) as client:
    client.get("/ready").raise_for_status()
    model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
    body = {"model": model, "prompt": "Hello", "max_tokens": 8, "temperature": 0}
    answer = client.post("/v1/completions", json=body).raise_for_status().json()
if answer["usage"]["completion_tokens"] < 1:
    sys.exit(f"no token: {answer}")
sys.stdout.write(f"{model}: {answer['choices'][0]['text']!r}\n")
