// The texts of the page. `t` reads the signal of the language, so that a change shows at once.
import { signal } from "@preact/signals";
import i18next from "i18next";
import type { ApiError } from "../api/calls";
import { built } from "../shell/build";
import en from "./en.json";

export const LANGUAGES = { en: "English", zh: "中文", ja: "日本語" } as const;
export type Language = keyof typeof LANGUAGES;

export const language = signal<Language>("en");

void i18next.init({
  lng: "en",
  fallbackLng: "en",
  resources: { en: { translation: en } },
  interpolation: { escapeValue: false }, // texts are text nodes
  initAsync: false,
});

/** Show the texts of a language. All but the English ones are loaded at their first use. */
export async function showLanguage(chosen: Language): Promise<void> {
  if (!i18next.hasResourceBundle(chosen, "translation")) {
    const { texts } = await built<{ texts: typeof en }>(chosen);
    i18next.addResourceBundle(chosen, "translation", texts);
  }
  document.documentElement.lang = chosen;
  await i18next.changeLanguage(chosen);
  language.value = chosen;
}

export async function setLanguage(chosen: Language): Promise<void> {
  await showLanguage(chosen);
  localStorage.setItem("sbx.language", chosen);
}

export function t(key: string, values: Record<string, unknown> = {}): string {
  void language.value;
  return i18next.t(key, values);
}

/** An error in the language of the page, or the sentence of the service. */
export function errorText(error: ApiError | { code: string; message: string; details?: Record<string, unknown> }): string {
  void language.value;
  const key = `error.${error.code}`;
  return i18next.exists(key) ? i18next.t(key, { ...error.details, message: error.message }) : `${error.message} (${error.code})`;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function size(bytes: number): string {
  let unit = 0;
  let value = bytes;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  const digits = unit === 0 || value >= 100 ? 0 : 1;
  return `${new Intl.NumberFormat(language.value, { maximumFractionDigits: digits }).format(value)} ${UNITS[unit]}`;
}

/** Seconds of the epoch, or ISO text: the service has both. */
export function seconds(time: number | string): number {
  return typeof time === "number" ? time : Date.parse(time) / 1000;
}

export function when(time: number | string | null): string {
  if (time === null) return "–";
  const at = seconds(time) * 1000;
  return new Intl.DateTimeFormat(language.value, { dateStyle: "medium", timeStyle: "short" }).format(at);
}

export function day(time: number): string {
  return new Intl.DateTimeFormat(language.value, { dateStyle: "medium" }).format(time * 1000);
}

export function share(part: number): string {
  return new Intl.NumberFormat(language.value, { style: "percent" }).format(part);
}

/** How long something took, to a tenth of a second. */
export function took(total: number): string {
  return new Intl.NumberFormat(language.value, { style: "unit", unit: "second", unitDisplay: "short", maximumFractionDigits: total < 10 ? 1 : 0 }).format(total);
}

export function duration(total: number): string {
  const left = Math.max(0, Math.round(total));
  const hours = Math.floor(left / 3600);
  const minutes = Math.floor((left % 3600) / 60);
  const rest = String(left % 60).padStart(2, "0");
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${rest}` : `${minutes}:${rest}`;
}
