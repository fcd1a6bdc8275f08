export { default as texts } from "./zh.json";
