"""The document describes what the routes really take."""

from __future__ import annotations


async def test_both_bodies_are_described(client):
    paths = (await client.get("/openapi.json")).json()["paths"]
    body = paths["/v1/images/generations"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["required"] == ["prompt"]
    assert body["additionalProperties"] is False
    assert body["properties"]["n"]["anyOf"][0] == {"maximum": 10, "minimum": 1, "type": "integer"}
    form = paths["/v1/images/edits"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert form["properties"]["image[]"]["items"] == {"type": "string", "format": "binary"}
    assert form["properties"]["n"]["maximum"] == 10
    assert form.keys() >= {"required", "anyOf"}
    assert all(field["type"] != "null" for field in form["properties"].values())
    for path in ("/v1/images/generations", "/v1/images/edits"):
        answers = paths[path]["post"]["responses"]
        assert {"200", "400", "401", "404", "413", "415", "429", "500", "503"} <= answers.keys()
        assert "422" not in answers
