// The two vendors' clients of one server: `node SCRIPT URL KEY MODEL`. Each script prints one JSON object.

import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const [url, key, name] = process.argv.slice(2);
const how = { maxRetries: 0, timeout: 120_000 };

export const model = name;
export const openai = new OpenAI({ ...how, baseURL: `${url}/v1`, apiKey: key });
export const anthropic = new Anthropic({ ...how, baseURL: url, apiKey: key });

export const report = (found) => console.log(JSON.stringify(found));

export const RULES = "You are a careful assistant of few words. ".repeat(8);
export const RIVER = {
  type: "object",
  properties: { river: { type: "string", enum: ["Loire", "Ebro", "Po"] }, navigable: { type: "boolean" } },
  required: ["river", "navigable"],
  additionalProperties: false,
};
export const WEATHER = {
  type: "object",
  properties: { city: { type: "string", enum: ["Oslo", "Rome"] }, days: { type: "integer", enum: [1, 2, 3] } },
  required: ["city", "days"],
  additionalProperties: false,
};
export const forecast = ({ city, days }) => `${city}: rain for ${days} days`;

// What the SDKs take for a validator, without a library that writes one.
export const RIVER_STANDARD = {
  "~standard": {
    version: 1,
    vendor: "tests",
    validate: (value) =>
      RIVER.properties.river.enum.includes(value?.river) ? { value } : { issues: [{ message: "not a river" }] },
    jsonSchema: { input: () => RIVER },
  },
};
