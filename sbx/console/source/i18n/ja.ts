export { default as texts } from "./ja.json";
