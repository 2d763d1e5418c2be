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


async def test_streams_are_described_event_by_event(client):
    paths = (await client.get("/openapi.json")).json()["paths"]
    for path in ("/v1/images/generations", "/v1/images/edits"):
        content = paths[path]["post"]["responses"]["200"]["content"]
        assert content["application/json"]["schema"] == {"$ref": "#/components/schemas/ImagesResponse"}
        events = content["text/event-stream"]["itemSchema"]["oneOf"]
        names = {name for event in events for name in event["properties"]["event"].get("enum", ["error"])}
        assert names == {
            *("image_generation.partial_image", "image_generation.completed", "image_generation.progress"),
            *("image_edit.partial_image", "image_edit.completed", "image_edit.progress", "error"),
        }
        assert all(event["properties"]["data"]["contentSchema"]["properties"] for event in events)


async def test_every_reference_leads_somewhere(client):
    document = (await client.get("/openapi.json")).json()

    def follow(node):
        for value in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            follow(value)
        if isinstance(node, dict) and isinstance(node.get("$ref"), str):
            target = document
            for name in node["$ref"].removeprefix("#/").split("/"):
                target = target[name]

    follow(document)
