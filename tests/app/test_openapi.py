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


async def test_chat_and_jobs_are_described(client):
    paths = (await client.get("/openapi.json")).json()["paths"]
    chat = paths["/v1/chat/completions"]["post"]
    body = chat["requestBody"]["content"]["application/json"]["schema"]
    assert body["required"] == ["messages"]
    assert {"size", "seed", "n", "stream", "response_format"} <= body["properties"].keys()
    content = chat["responses"]["200"]["content"]
    assert content["application/json"]["schema"] == {"$ref": "#/components/schemas/ChatCompletion"}
    assert len(content["text/event-stream"]["itemSchema"]["oneOf"]) == 2
    edits = paths["/v1/images/edits"]["post"]
    assert edits["requestBody"]["content"].keys() == {"multipart/form-data", "application/json"}
    assert {"202", "409"} <= edits["responses"].keys()
    assert {"image/png", "image/webp", "image/jpeg"} <= edits["responses"]["200"]["content"].keys()
    assert {"200", "202", "404"} <= paths["/v1/images/requests/{request_id}/result"]["get"]["responses"].keys()
    assert {"200", "403", "404"} <= paths["/v1/images/files/{name}"]["get"]["responses"].keys()


async def test_a_form_offers_what_it_takes(client):
    paths = (await client.get("/openapi.json")).json()["paths"]
    form = paths["/v1/images/edits"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert form["properties"]["stream"]["type"] == "boolean"
    assert form["properties"]["stream_options"]["properties"].keys() == {"include_progress"}
    for refused in ("mask", "markup", "svg", "frame_count"):
        assert refused not in form["properties"]
