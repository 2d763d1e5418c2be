"""POST /v1/images/edits: forms as clients really send them, and as they should never be."""

from __future__ import annotations

import pytest
from PIL import Image

URL = "/v1/images/edits"
FORM = {"content-type": "multipart/form-data; boundary=frontier"}


def part(name: str, content: bytes, more: str = "") -> bytes:
    return f'--frontier\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + content + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--frontier--\r\n"


@pytest.mark.parametrize("names", [["image"], ["image[]"], ["image[0]", "image[1]"], ["images", "image", "image[]"]])
async def test_spellings_of_the_image_field(client, engine, encoded, names):
    colours = ["red", "lime", "blue"][: len(names)]
    files = [
        (name, ("upload", encoded(Image.new("RGB", (40, 40), colour)), "application/octet-stream"))
        for name, colour in zip(names, colours, strict=True)
    ]
    response = await client.post(URL, data={"prompt": "a"}, files=files)
    assert response.status_code == 200, response.text
    pictures = engine.received[0].condition_images
    assert [picture.mode for picture in pictures] == ["RGBA"] * len(names)
    rgb = {"red": (255, 0, 0), "lime": (0, 255, 0), "blue": (0, 0, 255)}
    assert [picture.getpixel((0, 0))[:3] for picture in pictures] == [rgb[colour] for colour in colours]
    assert response.json()["usage"]["input_tokens_details"]["image_tokens"] == 3 * len(names)


async def test_form_values_mean_the_same_as_json(client, engine, png):
    texts = {
        **{"prompt": "a fox 🦊", "n": "2", "size": "96x64", "seed": "-1", "num_inference_steps": "7"},
        **{"true_cfg_scale": "4.5", "stream": "false", "partial_images": "0", "quality": "high", "user": "007"},
        **{"timeout_s": "0.5", "priority": "-3", "deterministic": "true"},
    }
    response = await client.post(URL, data=texts, files={"image": png})
    assert response.status_code == 200, response.text
    [params] = engine.received
    assert (params.prompt, params.num_images, params.size_px) == ("a fox 🦊", 2, (96, 64))
    assert (params.num_steps, params.true_cfg_scale) == (7, 4.5)
    assert (params.timeout_s, params.priority, params.deterministic) == (0.5, -3, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("n", text)
            for text in ("2.0", "true", "１", "٢", " 2", "2 ", "+2", "02", "0x2", "1e0", "", "null", "9" * 5000)
        ),
        *(("seed", text) for text in ("1_0", "-2", "4294967296", "NaN")),
        *(("true_cfg_scale", text) for text in ("NaN", "inf", "1e999", "true", ".5", "4,5", "21")),
        *(("timeout_s", text) for text in ("0", "3601", "10s")),
        *(("priority", text) for text in ("11", "1.0", "high")),
        *(("deterministic", text) for text in ("yes", "1")),
        *(("stream", text) for text in ("True", "0", "1", "no")),
        *(("prompt", text) for text in ("", "  ", "a\0b", "a" * 32_001)),
        *(("size", "1024"), ("quality", "best"), ("output_compression", "101")),
    ],
    ids=lambda text: text[:12],
)
async def test_bad_form_value_is_400_and_named(client, refused, png, name, value):
    refused(await client.post(URL, data={"prompt": "a", name: value}, files={"image": png}), 400, param=name)


async def test_form_field_that_is_not_utf8_is_400(client, refused, png):
    body = form(part("image", png), part("prompt", b"caf\xe9"))
    refused(await client.post(URL, content=body, headers=FORM), 400, param="prompt")


async def test_field_given_twice_is_400(client, refused, png):
    body = form(part("image", png), part("prompt", b"a"), part("prompt", b"b"))
    refused(await client.post(URL, content=body, headers=FORM), 400, param="prompt")


async def test_unknown_form_field_is_named(connect, refused, png):
    client = await connect()
    response = await client.post(URL, data={"prompt": "a", "lora": "/x"}, files={"image": png})
    refused(response, 400, param="lora", code="unknown_parameter")
    client = await connect(unknown_fields="warn")
    response = await client.post(URL, data={"prompt": "a", "lora": "/x"}, files={"image": png})
    assert "lora" in response.json()["warnings"][0]


@pytest.mark.parametrize(("name", "value"), [("mask", b"\x89PNG"), ("mask", b"x" * 300_000), ("markup", b"x")])
async def test_what_is_not_supported_yet_says_so(client, refused, png, name, value):
    body = form(part("image", png), part("prompt", b"a"), part(name, value))
    refused(await client.post(URL, content=body, headers=FORM), 400, param=name, code="unsupported_parameter")


async def test_file_in_an_unknown_field_is_named(client, refused, png):
    body = form(part("image", png), part("prompt", b"a"), part("picture", png, '; filename="a.png"'))
    refused(await client.post(URL, content=body, headers=FORM), 400, param="picture", code="unknown_parameter")


async def test_no_image_is_400(client, refused):
    body = form(part("prompt", b"a"))
    response = await client.post(URL, content=body, headers=FORM)
    refused(response, 400, param="image", code="missing_required_parameter")


async def test_missing_prompt_is_400(client, refused, png):
    refused(await client.post(URL, files={"image": png}), 400, param="prompt", code="missing_required_parameter")


async def test_fifth_image_is_refused_before_any_is_decoded(client, refused, monkeypatch):
    monkeypatch.setattr("app.orders.decode_upload", pytest.fail)
    files = [("image[]", b"junk")] * 5
    refused(await client.post(URL, data={"prompt": "a"}, files=files), 400, param="image", code="too_many_images")


async def test_four_images_are_taken(client, engine, png):
    response = await client.post(URL, data={"prompt": "a"}, files=[("image[]", png)] * 4)
    assert response.status_code == 200
    assert len(engine.received[0].condition_images) == 4


async def test_bad_fields_are_refused_before_any_image_is_decoded(client, refused, monkeypatch):
    monkeypatch.setattr("app.orders.decode_upload", pytest.fail)
    refused(await client.post(URL, data={"prompt": "a", "n": "11"}, files={"image": b"junk"}), 400, param="n")


async def test_full_queue_refuses_before_any_image_is_decoded(client, engine, refused, monkeypatch):
    monkeypatch.setattr("app.orders.decode_upload", pytest.fail)
    engine.is_full = True
    refused(await client.post(URL, data={"prompt": "a"}, files={"image": b"junk"}), 429, code="queue_full")


async def test_zero_byte_image_is_400(client, refused):
    refused(
        await client.post(URL, content=form(part("image", b""), part("prompt", b"a")), headers=FORM), 400, param="image"
    )


@pytest.mark.parametrize(
    "disposition", ["", '; filename=""', '; filename="../../etc/x"', '; filename="a\0b.png"', '; filename="x.svg"']
)
@pytest.mark.parametrize("content_type", ["", "\r\nContent-Type: image/svg+xml", "\r\nContent-Type: image/jpeg"])
async def test_file_names_and_declared_types_are_ignored(
    client, engine, png, tmp_path, monkeypatch, disposition, content_type
):
    monkeypatch.chdir(tmp_path)
    body = form(part("image", png, disposition + content_type), part("prompt", b"a"))
    response = await client.post(URL, content=body, headers=FORM)
    assert response.status_code == 200, response.text
    assert engine.received[0].condition_images[0].size == (48, 40)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content_type",
    [
        "multipart/form-data",
        "multipart/form-data; boundary=",
        'multipart/form-data; boundary=""',
        "multipart/form-data; boundary=" + "b" * 300,
        "multipart/form-data; boundary=other",
    ],
    ids=lambda text: text[19:40],
)
async def test_bad_boundary_is_400(client, refused, png, content_type):
    body = form(part("image", png), part("prompt", b"a"))
    response = await client.post(URL, content=body, headers={"content-type": content_type})
    refused(response, 400, code="invalid_form")


@pytest.mark.parametrize("kept", [0, 1, 20, 60, 75, -60, -14, -5])
async def test_truncated_form_is_400(client, refused, png, kept):
    body = form(part("image", png), part("prompt", b"a long prompt"))
    refused(await client.post(URL, content=body[:kept], headers=FORM), 400, code="invalid_form")


@pytest.mark.parametrize(
    "body",
    [
        form(*(part(f"f{i}", b"") for i in range(1001))),
        form(part("prompt", b"a", "; x=" + "h" * 100_000)),
        form(part("prompt", b"a", "".join(f"\r\nX-{i}: 1" for i in range(1000)))),
        form(part("prompt", b"a" * 10_000_000)),
        form(part("p" * 3000, b"a" * 300_000)),
        form(b"--frontier\r\n\r\nno headers\r\n"),
        form(b'--frontier\r\nContent-Disposition: form-data; filename="x"\r\n\r\nno name\r\n'),
        form(b"--frontier\r\nContent-Disposition: form-data; name*=utf-8''x\r\n\r\nno name\r\n"),
        form(b"--frontier\r\nbad header\r\n\r\n\r\n"),
        b"\r\n" * 100_000,
        b"--frontier--\r\n",
        b"",
    ],
    ids=lambda body: f"{len(body)} bytes",
)
async def test_hostile_form_is_400(client, body):
    response = await client.post(URL, content=body, headers=FORM)
    assert response.status_code == 400, response.text
    assert len(response.content) <= 2048


async def test_text_around_the_form_is_ignored(client, png):
    body = b"preamble" + b"\r\n" + form(part("image", png), part("prompt", b"a")) + b"epilogue"
    response = await client.post(URL, content=body[10:], headers=FORM)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("chunk_size", [1, 7, 64])
async def test_form_can_arrive_in_pieces(client, engine, png, chunk_size):
    body = form(part("image", png, '; filename="x"\r\nContent-Type: image/png'), part("prompt", b"a\r\n--frontie\r\nb"))

    async def pieces():
        for start in range(0, len(body), chunk_size):
            yield body[start : start + chunk_size]

    assert (await client.post(URL, content=pieces(), headers=FORM)).status_code == 200
    assert engine.received[0].prompt == "a\r\n--frontie\r\nb"


async def test_file_over_the_limit_is_413_while_it_arrives(connect, refused):
    client = await connect(max_image_bytes=100_000)
    sent = 0

    async def endless():
        nonlocal sent
        yield part("image", b"")[:-2]
        while True:
            sent += 10_000
            yield bytes(10_000)

    refused(await client.post(URL, content=endless(), headers=FORM), 413, param="image")
    assert sent <= 120_000


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "image/png"])
async def test_other_content_types_are_415(client, refused, content_type):
    headers = {"content-type": content_type} if content_type else {}
    refused(await client.post(URL, content=b"{}", headers=headers), 415)


async def test_unreadable_image_is_400(client, refused):
    refused(
        await client.post(URL, data={"prompt": "a"}, files={"image": b"<svg/>"}),
        400,
        param="image",
        code="invalid_image",
    )
    assert (await client.get("/health/ready")).status_code == 200


async def test_long_image_needs_an_explicit_size(client, refused, encoded):
    strip = {"image": encoded(Image.new("RGB", (900, 60)))}
    response = await client.post(URL, data={"prompt": "a"}, files=strip)
    assert refused(response, 400, param="size")
    response = await client.post(URL, data={"prompt": "a", "size": "64x64"}, files=strip)
    assert response.status_code == 200


@pytest.mark.parametrize(("size", "resolution"), [((800, 100), 64), ((800, 100), 2048), ((100, 790), 2048)])
async def test_automatic_size_keeps_to_the_limits_of_outputs(client, refused, encoded, size, resolution):
    strip = {"image": encoded(Image.new("RGB", size))}
    response = await client.post(URL, data={"prompt": "a", "resolution": str(resolution)}, files=strip)
    refused(response, 400, param="size")
