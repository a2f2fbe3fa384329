// Bundles the viewer into ../assets: one script, one style sheet, and the notices of what is in them.

import { build } from "esbuild";
import { createHash } from "node:crypto";
import { existsSync, mkdirSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";

const OUT = "../assets";
const MOST = 600 * 1024;

mkdirSync(OUT, { recursive: true });
const { metafile } = await build({
  entryPoints: { viewer: "src/app.tsx", style: "src/style.css" },
  outdir: OUT,
  entryNames: "[name]",
  bundle: true,
  minify: true,
  format: "iife",
  target: ["es2022"],
  jsx: "automatic",
  jsxImportSource: "preact",
  alias: { react: "preact/compat" },
  legalComments: "none", // they stand in licenses.txt
  charset: "ascii",
  metafile: true,
});

// Every package that has a byte in the bundle, with its licence.
const folders = new Set();
for (const input of Object.keys(metafile.outputs[`${OUT}/viewer.js`].inputs)) {
  let folder = dirname(input);
  while (folder.includes("node_modules") && !(existsSync(join(folder, "package.json")) && JSON.parse(readFileSync(join(folder, "package.json"))).version)) folder = dirname(folder);
  if (folder.includes("node_modules")) folders.add(folder);
}
const notices = [...folders].sort().map((folder) => {
  const { name, version, license } = JSON.parse(readFileSync(join(folder, "package.json")));
  const file = readdirSync(folder).find((f) => /^licen[sc]e/i.test(f));
  if (!file) throw new Error(`${name} has no licence file`);
  return `${name} ${version} (${license})\n\n${readFileSync(join(folder, file), "utf8").trim()}\n`;
});
writeFileSync(`${OUT}/licenses.txt`, `The viewer's script holds code of these packages.\n\n${notices.join(`\n${"-".repeat(80)}\n\n`)}`);

const script = readFileSync(`${OUT}/viewer.js`, "utf8");
if (/<\/script|<!--/i.test(script)) throw new Error("the script would end the element that it stands in");
const size = script.length + readFileSync(`${OUT}/style.css`).length;
if (size > MOST) throw new Error(`the bundle has ${size} bytes, more than ${MOST}`);

// What this was built from, so that a test can tell whether it has been built again since.
const sources = ["build.mjs", "package-lock.json", ...readdirSync("src").sort().map((f) => `src/${f}`)];
const hash = createHash("sha256");
for (const source of sources) hash.update(`${source}\n`).update(readFileSync(source));
writeFileSync(`${OUT}/sources.sha256`, `${hash.digest("hex")}\n`);
console.log(`${notices.length} packages, ${(size / 1024).toFixed(0)} KiB`);
