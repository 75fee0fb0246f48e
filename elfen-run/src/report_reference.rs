//! The reference of the report of a run: its JSON Schema and the table of its fields, both from the
//! types of the report and their comments.

use elfen_console::output::SCHEMA;
use elfen_console::reference::Page;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

use crate::live::page::Live;
use crate::report::RunReport;

/// A field of the report.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Field {
    /// Its path, such as `reaction_ns.p99`.
    pub path: String,
    pub kind: String,
    pub unit: &'static str,
    pub meaning: String,
}

/// The JSON Schema of the report, as `--json-out` writes it.
pub fn schema() -> Value {
    let settings = SchemaSettings::draft2020_12().for_serialize();
    let generator = settings.with(|settings| settings.inline_subschemas = true).into_generator();
    let mut schema = generator.into_root_schema_for::<RunReport>().to_value();
    let version = json!({
        "type": "integer",
        "const": SCHEMA,
        "description": "The version of this format. It increases when a field is removed or \
        changes its meaning, but not when a field is added.",
    });
    schema["title"] = "Report of elfen run --json-out".into();
    schema["description"] = "Times are nanoseconds.".into();
    schema["properties"]["schema"] = version;
    if let Some(required) = schema["required"].as_array_mut() {
        required.insert(0, "schema".into());
    }
    unwrap_lines(&mut schema);
    schema
}

/// The schema as a file of the reference.
pub fn schema_page() -> Page {
    // Formatting a value that this crate made cannot fail.
    let text = serde_json::to_string_pretty(&schema()).unwrap_or_default();
    ("run-report.schema.json", text + "\n")
}

/// Joins the lines of comments, which `rustfmt` breaks.
fn unwrap_lines(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                match value {
                    Value::String(text) if key == "description" => {
                        *text = text.split_whitespace().collect::<Vec<_>>().join(" ");
                    }
                    value => unwrap_lines(value),
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(unwrap_lines),
        _ => {}
    }
}

/// All fields of the report, in their order.
pub fn fields() -> Vec<Field> {
    let mut fields = Vec::new();
    let schema = schema();
    // The schema sorts its properties; the report itself has them in the order of its types.
    let example = RunReport { live: Some(Live::default()), ..RunReport::default() };
    let order = serde_json::to_string(&example).unwrap_or_default();
    let properties = schema["properties"].as_object();
    properties.into_iter().for_each(|all| add_fields(&mut fields, all, "", "", &order));
    fields
}

fn add_fields(
    fields: &mut Vec<Field>,
    properties: &Map<String, Value>,
    within: &str,
    unit_of_parent: &'static str,
    order: &str,
) {
    let position = |name: &str| position(order, name);
    let mut names: Vec<&String> = properties.keys().collect();
    names.sort_by_key(|name| position(name));
    for name in names {
        let field = &properties[name];
        let path = format!("{within}{name}");
        let unit = match name.as_str() {
            name if name.ends_with("_ns") => "ns",
            "n" => "count",
            "exit_status" | "schema" => "",
            "checks_per_ms" => "1/ms",
            _ if !kind(field).contains("integer") && !kind(field).contains("object") => "",
            _ if unit_of_parent.is_empty() => "count",
            _ => unit_of_parent,
        };
        let nested = nested(field);
        let after = position(name).map_or(order, |at| order[at..].trim_start_matches(|c| c != '{'));
        fields.push(Field {
            path: path.clone(),
            kind: kind(field),
            unit: if nested.is_some() { "" } else { unit },
            meaning: field["description"].as_str().unwrap_or_default().to_owned(),
        });
        if let Some(properties) = nested {
            let unit = if unit == "ns" { unit } else { "" };
            add_fields(fields, properties, &format!("{path}."), unit, after);
        }
    }
}

/// The position of a field of the object that begins `text`. The texts in it have no braces.
fn position(text: &str, name: &str) -> Option<usize> {
    let key = format!("\"{name}\":");
    let is_own = |at: &usize| {
        let count = |brace| text[..*at].matches(brace).count();
        count('{') == count('}') + 1
    };
    text.match_indices(&key).map(|(at, _)| at).find(is_own)
}

/// The fields of an object, which may also be null.
fn nested(field: &Value) -> Option<&Map<String, Value>> {
    let either = field["anyOf"].as_array().into_iter().flatten();
    std::iter::once(field).chain(either).find_map(|one| one["properties"].as_object())
}

/// The type of a field, in the words of JSON.
fn kind(field: &Value) -> String {
    let names = match &field["type"] {
        Value::String(name) => vec![name.as_str()],
        Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
        _ => field["anyOf"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|one| one["type"].as_str())
            .collect(),
    };
    let kind = names.join(" or ");
    match field["items"]["type"].as_str().or(field["additionalProperties"]["type"].as_str()) {
        Some(inner) => format!("{kind} of {inner}s"),
        None => kind,
    }
}

/// The table of fields, in Markdown.
pub fn table() -> String {
    let mut text = "| field | type | unit | meaning |\n| --- | --- | --- | --- |\n".to_owned();
    for Field { path, kind, unit, meaning } in fields() {
        text += &format!("| `{path}` | {kind} | {unit} | {meaning} |\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use elfen_console::output::print_json;

    use super::*;
    use crate::latency::Latency;

    /// The faults of a value by the keywords of JSON Schema that the report's schema uses.
    fn faults(value: &Value, schema: &Value, at: &str) -> Vec<String> {
        let mut found = Vec::new();
        if let Some(either) = schema["anyOf"].as_array() {
            if !either.iter().any(|one| faults(value, one, at).is_empty()) {
                found.push(format!("{at}: {value} is none of {either:?}"));
            }
            return found;
        }
        let is_kind = |kind: &Value| match kind.as_str().expect("a type") {
            "object" => value.is_object(),
            "array" => value.is_array(),
            "string" => value.is_string(),
            "integer" => value.is_u64(),
            "boolean" => value.is_boolean(),
            "null" => value.is_null(),
            other => panic!("type {other}"),
        };
        let is_fine = match &schema["type"] {
            Value::Array(kinds) => kinds.iter().any(is_kind),
            kind => is_kind(kind),
        };
        if !is_fine {
            found.push(format!("{at}: {value} is not of type {}", schema["type"]));
        }
        let bounds = [(&schema["minimum"], false), (&schema["maximum"], true)];
        for (bound, is_upper) in bounds {
            let (Some(bound), Some(value)) = (bound.as_u64(), value.as_u64()) else { continue };
            if (is_upper && value > bound) || (!is_upper && value < bound) {
                found.push(format!("{at}: {value} against {bound}"));
            }
        }
        let Some(properties) = schema["properties"].as_object() else { return found };
        let required: Vec<&str> =
            schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let Some(object) = value.as_object() else { return found };
        for name in properties.keys().filter(|name| required.contains(&name.as_str())) {
            if !object.contains_key(name) {
                found.push(format!("{at}.{name} is missing"));
            }
        }
        for (name, value) in object {
            match properties.get(name) {
                Some(schema) => found.extend(faults(value, schema, &format!("{at}.{name}"))),
                None => found.push(format!("{at}.{name} is not in the schema")),
            }
        }
        found
    }

    /// Reports as the command writes them: one with everything, one with all that can be missing.
    fn reports() -> [Value; 2] {
        let live = Live {
            first_check_after_ns: Some(1),
            refused: Some("why".to_owned()),
            missed_by: BTreeMap::from([("jit".to_owned(), 3)]),
            methods: vec!["a.B.c".to_owned()],
            ..Live::default()
        };
        let mut full = RunReport {
            nap_of_checks: Some("spin".to_owned()),
            ipc: Some("hardware".to_owned()),
            request_busy_ns: Some(u64::MAX),
            live: Some(live),
            exit_status: u8::MAX,
            ..RunReport::default()
        };
        full.figures.borrowed_ns = Some(5);
        full.figures.reaction_ns = Latency { median: Some(1), p99: Some(2), max: Some(3), n: 4 };
        [full, RunReport::default()].map(|report| {
            let mut text = Vec::new();
            print_json(&mut text, &report).unwrap();
            serde_json::from_slice(&text).unwrap()
        })
    }

    /// Goal: the schema is that of real reports: no field is missing and none is unknown. Method:
    /// the reports above, and one that lacks a field, has another, or has a wrong type.
    #[test]
    fn reports_match_the_schema() {
        let schema = schema();
        let [full, empty] = reports();
        assert_eq!(faults(&full, &schema, ""), Vec::<String>::new());
        assert_eq!(faults(&empty, &schema, ""), Vec::<String>::new());
        type Edit = fn(&mut Value);
        let edits: [(&str, Edit); 5] = [
            (".naps is missing", |it| drop(it.as_object_mut().unwrap().remove("naps"))),
            (".other is not in the schema", |it| it["other"] = 1.into()),
            (".live", |it| it["live"]["probes"] = Value::Null),
            (".exit_status", |it| it["exit_status"] = 256.into()),
            (".schema", |it| it["schema"] = "1".into()),
        ];
        for (fault, edit) in edits {
            let mut wrong = full.clone();
            edit(&mut wrong);
            let found = faults(&wrong, &schema, "");
            assert!(found.len() == 1 && found[0].starts_with(fault), "{fault}: {found:?}");
        }
    }

    /// Goal: the table lists the fields of a report, with a meaning for each. Method: the paths of
    /// a report with everything.
    #[test]
    fn the_table_lists_every_field() {
        fn paths(value: &Value, within: &str, into: &mut Vec<String>) {
            for (name, value) in value.as_object().into_iter().flatten() {
                let path = format!("{within}{name}");
                into.push(path.clone());
                // The names in this object are reasons, not fields.
                if name != "missed_by" {
                    paths(value, &format!("{path}."), into);
                }
            }
        }
        let [full, _] = reports();
        let mut expected = Vec::new();
        paths(&full, "", &mut expected);
        let mut listed: Vec<String> = fields().into_iter().map(|field| field.path).collect();
        assert_eq!(listed[..3], ["schema", "policy", "budget_ns"]);
        let at = |path: &str| listed.iter().position(|one| one == path).unwrap();
        assert_eq!(at("live.refused") + 1, at("live.methods"), "the order of the report");
        expected.sort_unstable();
        listed.sort_unstable();
        assert_eq!(listed, expected);
        for field in fields() {
            assert!(!field.meaning.is_empty() && !field.kind.is_empty(), "{field:?}");
        }
    }
}
