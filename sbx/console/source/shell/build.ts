// Parts of the page that are loaded at their first use.
const build = document.querySelector<HTMLMetaElement>("meta[name=sbx-build]")?.content ?? "";

export function built<T>(name: string): Promise<T> {
  const address = `/console/static/${name}.js?v=${build}`;
  return import(address) as Promise<T>;
}
