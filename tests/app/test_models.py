"""GET /v1/models: OpenAI's list, with a card that clients can plan by."""

from __future__ import annotations


async def test_list_and_card(client):
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    [model] = listed["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("easel-demo", "model", "easel")
    assert isinstance(model["created"], int)
    assert model["aliases"][0] == "gpt-image-1"
    card = model["capabilities"]
    assert (card["max_images"], card["max_input_images"], card["default_num_inference_steps"]) == (10, 4, 50)
    assert card["sizes"]["max_pixels"] == 2048 * 2048
    assert card["output_formats"] == ["png", "webp", "jpeg"]
    assert (card["response_formats"], card["max_partial_images"]) == (["b64_json", "url"], 3)
    assert card["needs_api_key"] is False


async def test_card_of_a_service_with_keys(connect):
    client = await connect(api_key=("one",))
    listed = (await client.get("/v1/models", headers={"authorization": "Bearer one"})).json()
    assert listed["data"][0]["capabilities"]["needs_api_key"] is True


async def test_retrieve_by_every_name(connect, refused):
    client = await connect(model="Qwen/Qwen-Image-2.1")
    for name in ("Qwen-Image-2.1", "Qwen/Qwen-Image-2.1", "Qwen%2FQwen-Image-2.1", "dall-e-2"):
        response = await client.get(f"/v1/models/{name}")
        assert response.json()["id"] == "Qwen-Image-2.1"
    refused(await client.get("/v1/models/gpt-4o"), 404, param="model", code="model_not_found")


async def test_while_loading(connect, engine, refused):
    engine.may_load.clear()
    client = await connect()
    refused(await client.get("/v1/models"), 503, code="not_ready")
