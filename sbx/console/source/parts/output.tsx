// Content that comes from a sandbox. It is text, an image in <img>, sanitised HTML, or a frame.
import { useSignal } from "@preact/signals";
import DOMPurify from "dompurify";
import { Marked } from "marked";
import type { JSX } from "preact";
import { useEffect, useMemo, useRef } from "preact/hooks";
import { at, request } from "../api/calls";
import { t } from "../i18n";
import type { Bundle, ImageFile } from "../types/agent";
import { ansi, withoutReturns } from "./ansi";
import { exact, safe } from "./common";
import { JsonTree } from "./json";

const SHOWN = 200_000; // characters
const SHOWN_MOST = 5_000_000;
const LIVE = 20_000;
const PART = 10_000;
const MARKDOWN = {
  FORBID_TAGS: ["style", "form", "input", "iframe", "svg", "math", "img", "textarea", "select", "button"],
  FORBID_ATTR: ["id", "name", "style", "class"],
  RETURN_TRUSTED_TYPE: true,
} as const;

/** The lines of a long text in parts: a browser does not lay out the parts that are out of view. */
function parts(text: string): string[] {
  const found: string[] = [];
  let begin = 0;
  while (text.length - begin > PART) {
    const end = text.indexOf("\n", begin + PART);
    if (end < 0) break;
    found.push(text.slice(begin, end));
    begin = end + 1;
  }
  found.push(text.slice(begin));
  return found;
}

/** Text of a program, with its colours. A long one is cut, and shown whole on request. Of a `live`
 * one, which grows, the end is enough. A `literal` one is what a person approves: a carriage return
 * or a colour must not hide a part of it. */
export function Output({ text, live, literal }: { text: string; live?: boolean; literal?: boolean }): JSX.Element {
  const show = literal ? exact : safe;
  const most = useSignal(SHOWN);
  const limit = live ? LIVE : most.value;
  const shown = text.length > limit ? text.slice(-limit) : text;
  const pieces = useMemo(() => (literal ? [{ text: shown, classes: "" }] : ansi(withoutReturns(shown))), [shown]);
  return (
    <>
      {shown.length < text.length && (
        <p class="fine">
          {t("output.cut", { count: text.length - shown.length })}{" "}
          {most.value === SHOWN && (
            <button type="button" class="plain" onClick={() => (most.value = literal ? Infinity : SHOWN_MOST)}>
              {t("output.show_all")}
            </button>
          )}
        </p>
      )}
      <pre class={literal ? "output literal" : "output"} tabIndex={0}>
        {pieces.map((piece, place) =>
          piece.text.length <= 2 * PART ? (
            <span key={place} class={piece.classes}>
              {show(piece.text)}
            </span>
          ) : (
            parts(piece.text).map((part, number) => (
              <span key={`${place} ${number}`} class={`part ${piece.classes}`}>
                {show(part)}
              </span>
            ))
          ),
        )}
      </pre>
    </>
  );
}

/** Text of a model. Links open elsewhere, with their host shown; images are their addresses. */
export function Markdown({ text }: { text: string }): JSX.Element {
  const html = useMemo(() => sanitised(text), [text]);
  return <div class="markdown" dangerouslySetInnerHTML={{ __html: html }} />;
}

const parser = new Marked({
  gfm: true,
  renderer: {
    image({ href, text }) {
      return escaped(`${text} ${href}`);
    },
    html({ text }) {
      return escaped(text);
    },
    link({ href, tokens }) {
      const inner = this.parser.parseInline(tokens);
      try {
        const url = new URL(href);
        if (!["http:", "https:", "mailto:"].includes(url.protocol)) return inner;
        const host = url.host ? ` <small>(${escaped(url.host)})</small>` : "";
        return `<a href="${escaped(url.href)}" target="_blank" rel="noopener noreferrer">${inner}</a>${host}`;
      } catch {
        return inner;
      }
    },
  },
});

function escaped(text: string): string {
  return text.replace(/[&<>"']/g, (char) => `&#${char.charCodeAt(0)};`);
}

function sanitised(text: string): string {
  const html = parser.parse(safe(text), { async: false });
  return DOMPurify.sanitize(html, { ...MARKDOWN, ADD_ATTR: ["target"] } as never) as unknown as string; // a TrustedHTML
}

export interface Place {
  sandbox: string;
  conversation: string;
}

/** The outputs of a call: figures, tables and HTML, each numbered from 1. */
export function Outputs({ bundles, place }: { bundles: Bundle[]; place: Place | null }): JSX.Element {
  let figures = 0;
  let plain = 0;
  let frames = 0;
  return (
    <>
      {bundles.slice(0, 50).map((bundle, index) => {
        if (bundle.truncated) return <p key={index} class="fine">{t("output.truncated")}</p>;
        const image = Object.entries(bundle).find(([type, value]) => type.startsWith("image/") && typeof value !== "boolean");
        if (image) {
          return <Figure key={index} number={++figures} image={image[1] as ImageFile | string} type={image[0]} place={place} />;
        }
        const html = bundle["text/html"];
        if (typeof html === "string") {
          const table = parsedTable(html);
          if (table) return <Table key={index} number={++plain} rows={table} />;
          return <HtmlOutput key={index} number={++frames} html={html} />;
        }
        if (typeof bundle["text/markdown"] === "string") return <Markdown key={index} text={bundle["text/markdown"]} />;
        const json = bundle["application/json"];
        if (json !== undefined) return <JsonTree key={index} value={json} open />;
        const text = bundle["text/plain"];
        return typeof text === "string" ? <Output key={index} text={text} /> : <p key={index} class="fine">{t("output.not_shown")}</p>;
      })}
    </>
  );
}

export function Figure({ number, image, type, place }: { number: number; image: ImageFile | string; type: string; place: Place | null }): JSX.Element {
  const url = useSignal<string | null>(null);
  const failed = useSignal(false);
  useEffect(() => {
    let made: string | null = null;
    let over = false;
    void blobOf(image, type, place).then(
      (blob) => {
        if (!over) url.value = made = URL.createObjectURL(blob);
      },
      () => (failed.value = true),
    );
    return () => {
      over = true;
      if (made) URL.revokeObjectURL(made);
    };
  }, [typeof image === "string" ? image : image.path]);
  const name = t("output.figure", { number });
  if (failed.value) return <p class="fine">{t("output.no_figure", { number })}</p>;
  return url.value ? <img class="figure" src={url.value} alt={name} /> : <p class="fine" aria-busy="true">{name}…</p>;
}

const IMAGE_TYPES = ["image/png", "image/jpeg", "image/gif", "image/webp", "image/svg+xml"];

async function blobOf(image: ImageFile | string, type: string, place: Place | null): Promise<Blob> {
  if (!IMAGE_TYPES.includes(type)) throw new Error("not an image that is shown");
  if (typeof image === "string") {
    if (type === "image/svg+xml") return new Blob([image], { type });
    const bytes = Uint8Array.from(atob(image), (char) => char.charCodeAt(0));
    return new Blob([bytes], { type });
  }
  if (image.data !== undefined) {
    const bytes = Uint8Array.from(atob(image.data), (char) => char.charCodeAt(0));
    return new Blob([bytes], { type });
  }
  if (!place) throw new Error("no place");
  const path = at(["v1", "sandboxes", place.sandbox, "conversations", place.conversation, "files"], { path: image.path, peek: true });
  return new Blob([await (await request("GET", path)).arrayBuffer()], { type });
}

/** Rename handlers, styles, and elements for styles and bases, which the policy of the page refuses: the browser would
 * report each one that DOMPurify parses. */
function quiet(html: string): string {
  const renamed = html.replace(/<[^>]*>/g, (tag) => tag.replace(/(\s|\/|["'])on[a-z]+(?=\s*=)/gi, "$1data-off").replace(/(\s|\/|["'])style(?=\s*=)/gi, "$1data-style"));
  return renamed.replace(/<(\/?)(style|base)/gi, "<$1x-$2");
}

const ADDRESSES = new Set(["src", "srcset", "poster", "background", "data", "xlink:href"]);
// The policies of the page and of the frame refuse such addresses, and the browser would report each.
DOMPurify.addHook("uponSanitizeAttribute", (_, data) => {
  if (ADDRESSES.has(data.attrName) && !/^(data|blob):/i.test(data.attrValue.trim())) data.keepAttr = false;
});

/** HTML and its styles for a frame, whose policy permits styles but no addresses. */
function forFrame(html: string): { html: string; css: string } {
  const css: string[] = [];
  const rest = html.replace(/<style[^>]*>([^]*?)<\/style>/gi, (_, text: string) => (css.push(text), ""));
  return {
    html: DOMPurify.sanitize(quiet(rest), { FORBID_TAGS: ["form", "iframe"] }).replace(/ data-style=/g, " style="),
    css: css.join("\n").replace(/@import[^;]*;?|url\((?!\s*["']?data:)[^)]*\)?/gi, ""),
  };
}

const ROWS = 2000;

const tables = new Map<string, string[][] | null>();
const TABLES = 100; // that are remembered: the page is drawn again for each event

function parsedTable(html: string): string[][] | null {
  if (!tables.has(html)) {
    if (tables.size >= TABLES) tables.clear();
    tables.set(html, tableOf(html));
  }
  return tables.get(html)!;
}

/** The rows of HTML that is one plain table; null for any other. */
function tableOf(html: string): string[][] | null {
  const inert = DOMPurify.sanitize(quiet(html), { RETURN_DOM_FRAGMENT: true, FORBID_TAGS: ["style", "img", "svg", "math", "iframe"] });
  const tables = inert.querySelectorAll("table");
  if (tables.length !== 1) return null;
  const outside = [...inert.querySelectorAll("*")].some((each) => !tables[0]!.contains(each) && !each.contains(tables[0]!) && each.textContent?.trim() && each.tagName !== "P");
  if (outside) return null;
  return [...tables[0]!.querySelectorAll("tr")].slice(0, ROWS).map((row) => [...row.querySelectorAll("th,td")].map((cell) => cell.textContent?.trim() ?? ""));
}

export function Table({ number, rows }: { number: number; rows: string[][] }): JSX.Element {
  const [head, ...rest] = rows;
  return (
    <div class="scroll" tabIndex={0}>
      <table aria-label={t("output.table", { number })}>
        <thead>
          <tr>{head?.map((cell, place) => <th key={place} scope="col">{safe(cell)}</th>)}</tr>
        </thead>
        <tbody>
          {rest.map((row, line) => (
            <tr key={line}>{row.map((cell, place) => <td key={place}>{safe(cell)}</td>)}</tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** Other HTML, sanitised, in a frame of another origin. Its scripts run only after a click. */
function HtmlOutput({ number, html }: { number: number; html: string }): JSX.Element {
  const scripts = useSignal(false);
  const height = useSignal(60);
  const frame = useRef<HTMLIFrameElement>(null);
  const base = document.querySelector<HTMLMetaElement>("meta[name=sbx-frames]")?.content ?? "";
  const file = scripts.value ? "frame-scripts.html" : "frame.html";
  useEffect(() => {
    const receive = (event: MessageEvent): void => {
      const target = frame.current?.contentWindow;
      if (!target || event.source !== target) return;
      const report = event.data as { ready?: boolean; height?: number };
      if (report.ready) {
        const content = scripts.value ? { html } : forFrame(html);
        const scheme = getComputedStyle(document.documentElement).colorScheme;
        target.postMessage({ ...content, scheme }, "*");
      } else if (typeof report.height === "number") {
        height.value = Math.min(Math.max(report.height, 40), 2000);
      }
    };
    addEventListener("message", receive);
    return () => removeEventListener("message", receive);
  }, [html, scripts.value]);
  return (
    <div class="html-output">
      <iframe ref={frame} key={file} title={t("output.html", { number })} src={`${base}/console/${file}`} sandbox="allow-scripts" style={{ height: `${height.value}px` }} />
      {!scripts.value && /<script|\son\w+=/i.test(html) && (
        <p class="fine">
          <button type="button" class="plain" onClick={() => (scripts.value = true)}>
            {t("output.run_scripts")}
          </button>{" "}
          {t("output.run_scripts_warning")}
        </p>
      )}
    </div>
  );
}
