// Runs before the first paint: the language and the theme of the person.
const language = localStorage.getItem("sbx.language") ?? navigator.languages.map((each) => each.slice(0, 2)).find((each) => ["en", "zh", "ja"].includes(each)) ?? "en";
document.documentElement.lang = language;
document.documentElement.dataset.theme = localStorage.getItem("sbx.theme") ?? "system";

export {};
