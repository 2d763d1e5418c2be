"""POST /v1/images/generations: what it draws, and what it refuses."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image

URL = "/v1/images/generations"
JSON = {"content-type": "application/json"}


async def test_answer_has_the_shape_clients_expect(client, opened):
    response = await client.post(URL, json={"prompt": "a lighthouse", "n": 2, "size": "96x64", "seed": 2**32 - 1})
    answer = response.json()
    assert answer.keys() == {
        *("created", "data", "background", "output_format", "quality", "size", "usage", "model", "warnings", "metrics")
    }
    assert [image.keys() for image in answer["data"]] == [{"b64_json", "seed"}] * 2
    assert [image["seed"] for image in answer["data"]] == [2**32 - 1, 0]
    assert answer["size"] == "96x64"
    assert opened(response).size == (96, 64)
    assert answer["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"text_tokens": 7, "image_tokens": 0},
        "output_tokens": 32,
        "output_tokens_details": {"image_tokens": 32, "text_tokens": 0},
        "total_tokens": 39,
    }
    assert (answer["model"], answer["quality"], answer["output_format"]) == ("easel-demo", "high", "png")
    assert answer["warnings"] == []
    assert answer["metrics"].pop("file_seconds") > 0
    assert answer["metrics"] == {
        "queue_seconds": 0.5,
        "encode_seconds": 0.25,
        "prefill_seconds": 0.125,
        "steps_seconds": 2.0,
        "decode_seconds": 1.0,
        "batch_size": 1.5,
    }


async def test_every_field_reaches_the_engine(client, engine):
    fields = {
        "prompt": "a",
        "negative_prompt": "",
        "n": 3,
        "size": "100x70",
        "seed": 5,
        "num_inference_steps": 7,
        "true_cfg_scale": 4,
        "resolution": 512,
        "timeout_s": 90,
        "priority": -10,
        "deterministic": True,
    }
    assert (await client.post(URL, json=fields)).status_code == 200
    [params] = engine.received
    assert (params.prompt, params.negative_prompt, params.num_images, params.size_px) == ("a", "", 3, (100, 70))
    assert (params.seed, params.num_steps, params.true_cfg_scale, params.resolution_px) == (5, 7, 4.0, 512)
    assert (params.timeout_s, params.priority, params.deterministic) == (90.0, -10, True)


async def test_null_means_absent(client, engine):
    names = (await client.get("/openapi.json")).json()["paths"][URL]["post"]["requestBody"]["content"]
    nothing = dict.fromkeys(names["application/json"]["schema"]["properties"])
    for fields in ({"prompt": "a"}, {**nothing, "prompt": "a"}):
        assert (await client.post(URL, json=fields)).status_code == 200
    bare, nulled = engine.received
    assert (bare.timeout_s, bare.priority, bare.deterministic) == (None, 0, False)
    assert bare.seed != nulled.seed
    assert (bare.size_px, bare.num_steps, bare.num_images) == (nulled.size_px, nulled.num_steps, nulled.num_images)


@pytest.mark.parametrize("prompt", ["سفينة في البحر", "🦊🌲" * 20, "𠜎𠜱𠝹", "e\u0301\u200f"])
async def test_any_script_is_drawn(client, engine, prompt):
    assert (await client.post(URL, json={"prompt": prompt})).status_code == 200
    assert engine.received[0].prompt == prompt


@pytest.mark.parametrize(
    ("quality", "steps", "reported"),
    [(word, None, "high") for word in ("auto", "standard", "high", "hd", "max", "xhigh")]
    + [("medium", 30, "medium"), ("low", 18, "low")],
)
async def test_quality_is_a_share_of_the_steps(client, engine, quality, steps, reported):
    response = await client.post(URL, json={"prompt": "a", "quality": quality})
    assert response.json()["quality"] == reported
    assert engine.received[0].num_steps == steps


async def test_explicit_steps_win_over_quality(client, engine):
    await client.post(URL, json={"prompt": "a", "quality": "low", "num_inference_steps": 44})
    assert engine.received[0].num_steps == 44


async def test_quality_of_a_model_with_fixed_steps_is_a_warning(client, engine):
    engine.fixed_num_steps = True
    response = await client.post(URL, json={"prompt": "a", "quality": "low"})
    assert engine.received[0].num_steps is None
    assert "quality" in response.json()["warnings"][0]


@pytest.mark.parametrize(
    ("alpha", "background", "output_format", "kept"),
    [
        (255, "auto", "png", False),
        (240, "auto", "png", False),
        (128, "auto", "png", True),
        (128, "auto", "webp", True),
        (128, "auto", "jpeg", False),
        (255, "transparent", "png", True),
        (128, "opaque", "png", False),
        (128, "opaque", "webp", False),
        (128, "opaque", "jpeg", False),
    ],
)
async def test_background_decides_about_alpha(client, engine, opened, alpha, background, output_format, kept):
    engine.alpha = alpha
    fields = {"prompt": "a", "seed": 0, "background": background, "output_format": output_format}
    response = await client.post(URL, json=fields)
    image = opened(response)
    assert response.json()["background"] == ("transparent" if kept else "opaque")
    assert response.json()["output_format"] == output_format
    assert image.format == output_format.upper()
    if alpha == 255 and kept and output_format == "png":
        assert image.mode == "RGBA"
    elif output_format == "png":
        assert image.mode == ("RGBA" if kept else "RGB")
    if alpha == 128 and not kept:
        # blue is 0 in the gradient of seed 0: half of it over white is 127
        assert np.abs(np.asarray(image)[..., 2].astype(int) - 127).max() <= 6


async def test_transparent_jpeg_is_refused(client, refused):
    fields = {"prompt": "a", "background": "transparent", "output_format": "jpeg"}
    refused(await client.post(URL, json=fields), 400, param="background")


@pytest.mark.parametrize("output_format", ["webp", "jpeg"])
async def test_compression_changes_the_file(client, output_format):
    sizes = []
    for compression in (0, 50, 100):
        fields = {"prompt": "a", "size": "256x256", "output_format": output_format, "output_compression": compression}
        sizes.append(len((await client.post(URL, json=fields)).content))
    assert sizes[0] < sizes[1] < sizes[2]


async def test_fields_without_effect_are_named(client):
    fields = {"user": "u", "safety_identifier": "s", "moderation": "auto", "stream": False, "partial_images": 0}
    assert (await client.post(URL, json={"prompt": "a", **fields})).json()["warnings"] == []
    fields = {"moderation": "low", "style": "vivid", "input_fidelity": "high", "output_compression": 50}
    warnings = (await client.post(URL, json={"prompt": "a", **fields})).json()["warnings"]
    assert [name for name in fields if any(name in warning for warning in warnings)] == list(fields)


@pytest.mark.parametrize("model", ["easel-demo", "gpt-image-1", "gpt-image-1-mini", "gpt-image-1.5", "dall-e-3", None])
async def test_model_names_that_are_served(client, model):
    assert (await client.post(URL, json={"prompt": "a", "model": model})).json()["model"] == "easel-demo"


@pytest.mark.parametrize("model", ["gpt-4o", "", "EASEL-DEMO", "../easel-demo"])
async def test_unknown_model_is_404(client, refused, model):
    refused(await client.post(URL, json={"prompt": "a", "model": model}), 404, param="model", code="model_not_found")


async def test_names_of_a_model_from_a_hub(connect):
    client = await connect(model="Qwen/Qwen-Image-2.1")
    for name in ("Qwen/Qwen-Image-2.1", "Qwen-Image-2.1"):
        assert (await client.post(URL, json={"prompt": "a", "model": name})).json()["model"] == "Qwen-Image-2.1"
    client = await connect(model="/models/secret-place", served_model_name="painter", model_aliases=())
    assert (await client.post(URL, json={"prompt": "a"})).json()["model"] == "painter"
    response = await client.post(URL, json={"prompt": "a", "model": "gpt-image-1"})
    assert response.status_code == 404
    assert "secret" not in response.text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": "a"',
        b'{"prompt": "a"} {}',
        b"null",
        b"[]",
        b'"a"',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        '{"prompt": "a"}'.encode("utf-16"),
        b'{"prompt": ' + b"[" * 100_000,
        b"[" * 100_000,
        b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "seed": ' + b"9" * 4000 + b"}",
        b'{"prompt": "a", "unheard": ' + b"9" * 5000 + b"}",
        *(
            b'{"prompt": "a", "%s": %s}' % (name, number)
            for name in (b"true_cfg_scale", b"n", b"unheard")
            for number in (b"NaN", b"Infinity", b"-Infinity", b"1e999", b'[1, {"a": NaN}]')
        ),
    ],
    ids=lambda body: body[:44].decode("latin-1"),
)
@pytest.mark.parametrize("unknown_fields", ["error", "warn"])
async def test_broken_json_is_400(connect, body, unknown_fields):
    client = await connect(unknown_fields=unknown_fields)
    response = await client.post(URL, content=body, headers=JSON)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]
    assert len(response.content) <= 2048
    assert (await client.post(URL, json={"prompt": "a"})).status_code == 200


@pytest.mark.parametrize(
    "value", [b"[" + b"1," * 5_000_000 + b"1]", b"[" + b"{}," * 3_000_000 + b"1]", b'"' + b"\\," * 5_000_000]
)
async def test_crowded_body_is_refused_before_it_is_parsed(client, refused, value):
    response = await client.post(URL, content=b'{"prompt": "a", "x": ' + value + b"}", headers=JSON)
    refused(response, 400, code="invalid_json")
    assert response.json()["error"]["message"] == "The JSON body holds too many values."


async def test_json_longer_than_any_request_is_413(client, refused):
    refused(await client.post(URL, content=b" " * (2**24 + 1), headers=JSON), 413)


async def test_many_unknown_fields_are_refused_or_named_in_part(connect, refused):
    fields = {"prompt": "a", **{f"f{i}": i for i in range(3000)}}
    refused(await (await connect()).post(URL, json=fields), 400, param="f0", code="unknown_parameter")
    answer = await (await connect(unknown_fields="warn")).post(URL, json=fields)
    assert len(answer.json()["warnings"]) == 20


BAD_VALUES = [
    *(("prompt", prompt) for prompt in (None, "", "  \n\t", 5, True, ["a"], {"text": "a"}, "a\0b", "a" * 32_001)),
    *(("n", n) for n in (0, -1, 11, 10**9, 10**30, True, "2", 1.5, 1.0, [])),
    *(("seed", seed) for seed in (-2, 2**32, 1.0, "1", True)),
    *(("num_inference_steps", steps) for steps in (0, 201, "20", 20.0)),
    *(("true_cfg_scale", scale) for scale in (-1, 21, "4", True)),
    *(("output_compression", value) for value in (-1, 101, 50.5, "50")),
    *(("output_format", value) for value in ("bmp", "jpg", "PNG", 1)),
    *(("quality", value) for value in ("best", "", 3)),
    *(("background", value) for value in ("white", False)),
    *(("response_format", value) for value in ("b64", 1)),
    *(("stream", value) for value in ("false", 0, 1)),
    *(("partial_images", value) for value in (-1, 4, "0")),
    *(("negative_prompt", value) for value in (1, "\0", "a" * 32_001)),
    *(("resolution", value) for value in (0, 63, 2049, 10**18, "64", 64.0)),
    *(("timeout_s", value) for value in (0, -1, 3600.5, "60", True)),
    *(("priority", value) for value in (-11, 11, 1.0, "1", True)),
    *(("deterministic", value) for value in (1, "true")),
    *(("user", value) for value in (1, "a" * 513)),
    *(("model", value) for value in (1, ["easel-demo"])),
    ("moderation", "none"),
    ("style", "cubist"),
    ("input_fidelity", "medium"),
    *(
        ("size", size)
        for size in (
            *("1024", "1024x", "x1024", "0x1024", "-1x1", "1024X1024", "1024 x 1024", " 1024x1024", "1024x1024\n"),
            *("１０２４x１０２４", "٣٢٠x٣٢٠", "100000x10000", "9" * 400 + "x64", "63x64", "4097x64", "2048x2049"),
            *("64x513", "100x10000", "1024*1024", "auto ", "", "064x064", "1e3x1e3", 1024, [64, 64]),
        )
    ),
]


@pytest.mark.parametrize(("name", "value"), BAD_VALUES, ids=lambda part: str(part)[:24])
async def test_bad_value_is_400_and_named(client, refused, name, value):
    refused(await client.post(URL, json={"prompt": "a", name: value}), 400, param=name)


async def test_missing_prompt_is_400(client, refused):
    refused(await client.post(URL, json={}), 400, param="prompt", code="missing_required_parameter")


async def test_size_refusal_says_what_is_allowed(client, refused):
    error = refused(await client.post(URL, json={"prompt": "a", "size": "9x9"}), 400, param="size")
    assert all(limit in error["message"] for limit in ("auto", "64", "4096", str(2048 * 2048), "8:1"))


@pytest.mark.parametrize("size", ["64x64", "64x512", "4096x1024", "2048x2048", "65x67"])
async def test_sizes_at_the_limits_are_drawn_exactly(client, opened, size):
    response = await client.post(URL, json={"prompt": "a", "size": size, "output_format": "jpeg"})
    assert response.json()["size"] == size
    assert "x".join(map(str, opened(response).size)) == size


async def test_huge_prompt_is_refused_without_an_echo(client, refused):
    response = await client.post(URL, json={"prompt": "canary" * 1_700_000})
    refused(response, 400, param="prompt")
    assert "canary" not in response.text


async def test_longest_prompt_is_taken(client):
    assert (await client.post(URL, json={"prompt": "𠜎" * 32_000})).status_code == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("mask", "x"), ("markup", {})),
        *(("output_format", "svg"), ("output_format", "gif")),
    ],
)
async def test_what_is_not_supported_yet_says_so(client, refused, name, value):
    refused(await client.post(URL, json={"prompt": "a", name: value}), 400, param=name, code="unsupported_parameter")


@pytest.mark.parametrize("name", ["path", "model_path", "custom_pipeline", "lora", "steps", "__class__", "prompt "])
async def test_unknown_field_is_named(client, refused, name):
    error = refused(
        await client.post(URL, json={"prompt": "a", name: "/etc/passwd"}), 400, param=name, code="unknown_parameter"
    )
    assert name in error["message"]
    assert "passwd" not in error["message"]


async def test_long_or_binary_field_name_is_not_repeated_whole(client, refused):
    response = await client.post(URL, json={"prompt": "a", "\u202eé\x07" + "k" * 5000: 1})
    error = refused(response, 400, param="???" + "k" * 61)
    assert error["message"].isascii()


async def test_unknown_fields_can_be_warnings(connect):
    client = await connect(unknown_fields="warn")
    answer = (await client.post(URL, json={"prompt": "a", "lora": "/x", "cfg\n": 1})).json()
    assert [("lora" in text, "cfg?" in text) for text in answer["warnings"]] == [(True, False), (False, True)]
    assert "/x" not in json.dumps(answer["warnings"])


@pytest.mark.parametrize(
    ("n", "steps", "size", "status"),
    [(1, 200, "2048x2048", 200), (10, 50, "1024x1024", 200), (10, 200, "2048x2048", 400), (10, 200, "1024x1024", 400)],
)
async def test_work_over_the_budget_is_refused(client, engine, monkeypatch, n, steps, size, status):
    monkeypatch.setattr(engine, "draw", lambda *_: np.zeros((1, 1, 4), np.uint8))
    response = await client.post(URL, json={"prompt": "a", "n": n, "num_inference_steps": steps, "size": size})
    assert response.status_code == status
    assert len(engine.received) == (status == 200)


async def test_budget_counts_the_defaults(connect, refused):
    client = await connect(max_pixel_steps=50 * 64 * 64)
    assert (await client.post(URL, json={"prompt": "a"})).status_code == 200
    refused(await client.post(URL, json={"prompt": "a", "n": 2}), 400, param="n")
    refused(await client.post(URL, json={"prompt": "a", "resolution": 96}), 400, param="n")


@pytest.mark.parametrize(
    "content_type",
    [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonp", "multipart/form-data"],
)
async def test_other_content_types_are_415(client, refused, content_type):
    headers = {"content-type": content_type} if content_type else {}
    refused(await client.post(URL, content=b'{"prompt": "a"}', headers=headers), 415)


@pytest.mark.parametrize("coding", ["gzip", "br", "identity, gzip"])
async def test_compressed_bodies_are_415(client, refused, coding):
    headers = {**JSON, "content-encoding": coding}
    refused(await client.post(URL, content=b'{"prompt": "a"}', headers=headers), 415)


@pytest.mark.parametrize("more", [("content-type", "text/plain"), ("content-encoding", "gzip")])
async def test_a_second_header_hides_behind_none(client, refused, more):
    headers = [*JSON.items(), ("content-encoding", "identity"), more]
    refused(await client.post(URL, content=b'{"prompt": "a"}', headers=headers), 415)


@pytest.mark.parametrize(
    "headers", [{"content-type": "Application/JSON; charset=utf-8"}, {"content-encoding": "identity"}]
)
async def test_harmless_headers_are_taken(client, headers):
    response = await client.post(URL, content=b'{"prompt": "a"}', headers={**JSON, **headers})
    assert response.status_code == 200


async def test_output_carries_no_metadata(client, opened):
    for output_format in ("png", "webp", "jpeg"):
        response = await client.post(URL, json={"prompt": "canary", "output_format": output_format})
        image = opened(response)
        assert not image.getexif()
        assert not image.info.keys() & {"exif", "xmp", "icc_profile", "comment", "parameters"}


@pytest.mark.parametrize(
    ("accept", "fields", "kind"),
    [
        ("image/*", {}, "image/png"),
        ("image/*", {"output_format": "jpeg"}, "image/jpeg"),
        ("image/webp", {}, "image/webp"),
        ("image/avif,image/webp;q=0.9,image/*;q=0.5,*/*;q=0.1", {}, "image/webp"),
        ("image/webp", {"output_format": "png"}, "image/png"),
        ("IMAGE/PNG", {"response_format": "url"}, "image/png"),
        ("image/*", {"n": 2}, "application/json"),
        ("application/json, image/*", {}, "application/json"),
        ("*/*", {}, "application/json"),
        ("", {}, "application/json"),
        ("image/*", {"stream": True}, "text/event-stream; charset=utf-8"),
    ],
)
async def test_raw_file_for_those_who_accept_images(client, accept, fields, kind):
    response = await client.post(URL, json={"prompt": "a", "seed": 4, **fields}, headers={"accept": accept})
    assert (response.status_code, response.headers["content-type"]) == (200, kind)
    if kind.startswith("image/"):
        with Image.open(io.BytesIO(response.content)) as picture:
            assert f"image/{picture.format.lower()}" == kind
        assert response.headers["x-easel-seed"] == "4"
        plain = await client.post(URL, json={"prompt": "a", "seed": 4, "output_format": kind.partition("/")[2]})
        assert base64.b64decode(plain.json()["data"][0]["b64_json"]) == response.content


async def test_warnings_of_a_raw_file_are_in_a_header(client):
    response = await client.post(URL, json={"prompt": "a", "style": "vivid"}, headers={"accept": "image/png"})
    assert "style" in response.headers["x-easel-warnings"]


@pytest.mark.parametrize("name", ["svg", "frame_count", "frame_duration_ms"])
async def test_fields_of_other_kinds_of_output(client, refused, name):
    refused(await client.post(URL, json={"prompt": "a", name: 2}), 400, param=name, code="unsupported_parameter")


async def test_caching_and_complexity_are_typed_and_have_no_effect(client, refused):
    answer = (await client.post(URL, json={"prompt": "a", "cache": True, "complexity": "high"})).json()
    assert len(answer["warnings"]) == 2
    assert (await client.post(URL, json={"prompt": "a", "cache": False})).json()["warnings"] == []
    refused(await client.post(URL, json={"prompt": "a", "cache": "yes"}), 400, param="cache")
