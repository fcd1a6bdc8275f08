// Builds ../static from this directory; with --tests, the unit tests into built-tests.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, rmSync, writeFileSync, mkdirSync, copyFileSync, existsSync } from "node:fs";
import { join } from "node:path";
import { build } from "esbuild";

const common = {
  bundle: true,
  format: "esm",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  logLevel: "warning",
};

if (process.argv.includes("--tests")) {
  rmSync("built-tests", { recursive: true, force: true });
  const tests = readdirSync("tests").filter((name) => name.endsWith(".test.ts"));
  await build({
    ...common,
    entryPoints: tests.map((name) => join("tests", name)),
    outdir: "built-tests",
    platform: "node",
  });
} else {
  const out = join("..", "static");
  rmSync(out, { recursive: true, force: true });
  mkdirSync(out);
  await build({
    ...common,
    entryPoints: { app: "main.tsx", boot: "boot.ts", terminal: "parts/xterm.ts", editor: "parts/codemirror.ts", csv: "parts/csv.ts", zh: "i18n/zh.ts", ja: "i18n/ja.ts" },
    outdir: out,
    minify: true,
    charset: "utf8",
  });
  await build({ ...common, entryPoints: { app: "styles/app.css" }, outdir: out, minify: true });
  for (const name of ["index.html", "frame.html", "frame-scripts.html", "icon.svg"]) {
    copyFileSync(name, join(out, name));
  }
  const lock = JSON.parse(readFileSync("package-lock.json", "utf8"));
  const shipped = Object.entries(lock.packages).filter(([path, entry]) => path && !entry.dev && !entry.devOptional && !entry.optional && existsSync(path));
  const licences = shipped.map(([path, entry]) => {
    const file = readdirSync(path).find((name) => /^licen[cs]e/i.test(name));
    const text = file && existsSync(join(path, file)) ? readFileSync(join(path, file), "utf8") : "";
    return `${path.replace(/.*node_modules\//, "")} ${entry.version} (${entry.license})\n\n${text.trim()}\n`;
  });
  writeFileSync(join(out, "THIRD_PARTY.txt"), licences.join(`\n${"-".repeat(80)}\n\n`));
  const digest = createHash("sha256");
  for (const name of readdirSync(out).sort()) {
    digest.update(name).update(readFileSync(join(out, name)));
  }
  writeFileSync(join(out, "BUILD"), `${digest.digest("hex").slice(0, 16)}\n`);
}
