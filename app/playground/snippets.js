/* The same picture from a shell or a program. A key is never written out: it comes from the environment. */

const SDK_PARAMETERS = ["prompt", "size", "n"];
const EXTENSIONS = { "image/png": "png", "image/jpeg": "jpg", "image/webp": "webp" };
let needsKey = false;

/** Whether the service asks for a key. */
export function describeAccess(card) {
  needsKey = card.needs_api_key;
}

const base = () => new URL("v1", document.baseURI).href;
const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

/** The names of the input images: those that they have on the disk, if these are plain and differ. */
function namesOf(files) {
  const names = files.map((file) => file.name);
  const arePlain = names.every((name) => /^\w[\w.-]*$/.test(name)) && new Set(names).size === names.length;
  return arePlain ? names : files.map(({ type }, index) => `image-${index + 1}.${EXTENSIONS[type]}`);
}

export function curlOf({ fields, images }) {
  const endpoint = images.length ? "edits" : "generations";
  const lines = [`curl -fsS ${quoted(`${base()}/images/${endpoint}`)}`, "-H 'accept: image/png'"];
  if (needsKey) lines.push('-H "authorization: Bearer $EASEL_API_KEY"');
  if (images.length) {
    lines.push(...namesOf(images).map((name) => `-F 'image[]=@${name}'`));
    lines.push(...Object.entries(fields).map(([name, value]) => `--form-string ${quoted(`${name}=${value}`)}`));
  } else {
    lines.push("-H 'content-type: application/json'", `-d ${quoted(JSON.stringify(fields))}`);
  }
  return `${[...lines, "-o picture.png"].join(" \\\n  ")}\n`;
}

export function pythonOf({ fields, images }) {
  const entries = Object.entries(fields);
  const known = entries.filter(([name]) => SDK_PARAMETERS.includes(name));
  const others = Object.fromEntries(entries.filter(([name]) => !SDK_PARAMETERS.includes(name)));
  const files = namesOf(images).map((name) => `open(${JSON.stringify(name)}, "rb")`);
  const parameters = [
    ...(files.length ? [`image=[${files.join(", ")}]`] : []),
    ...known.map(([name, value]) => `${name}=${JSON.stringify(value)}`),
    `extra_body=${JSON.stringify(others)}`,
  ];
  const key = needsKey ? 'os.environ["EASEL_API_KEY"]' : '"unused"';
  return `import base64
${needsKey ? "import os\n" : ""}from pathlib import Path

from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(base())}, api_key=${key})
answer = client.images.${files.length ? "edit" : "generate"}(
${parameters.map((parameter) => `    ${parameter},`).join("\n")}
)
Path("picture.png").write_bytes(base64.b64decode(answer.data[0].b64_json))
`;
}
