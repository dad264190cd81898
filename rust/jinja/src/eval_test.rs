//! Printed sums of strings, which are evaluated without joining their parts: they give the text and the errors
//! that the same sum gives when a variable takes it.

use super::ops::MAX_SIZE;
use super::{Context, Options, Template};

fn render(source: &str, variables: &str) -> Result<String, String> {
    let template = Template::compile(source).map_err(|error| error.to_string())?;
    let context = Context { variables: variables.as_bytes(), messages: b"", aliases: false };
    template.render(context, Options::default()).map_err(|error| error.to_string())
}

/// Returns the rendered sum, which is checked to be the same when a variable takes it first.
fn sum(expression: &str, context: &str) -> Result<String, String> {
    let printed = render(&format!("{{{{ {expression} }}}}"), context);
    let assigned = render(&format!("{{% set x = {expression} %}}{{{{ x }}}}"), context);
    assert_eq!(printed, assigned, "{expression}");
    printed
}

#[test]
fn printed_sums_join_strings_numbers_and_lists() {
    let context = r#"{"a": "one", "b": "two"}"#;
    assert_eq!(sum("a + ' ' + b + '!'", context).unwrap(), "one two!");
    assert_eq!(sum("a + (' ' + b) + ''", context).unwrap(), "one two");
    assert_eq!(sum("1 + 2 + 3.5", context).unwrap(), "6.5");
    assert_eq!(sum("[a] + [b]", context).unwrap(), "['one', 'two']");
    assert_eq!(sum("a", context).unwrap(), "one");
}

#[test]
fn markup_in_a_printed_sum_escapes_the_strings_around_it() {
    let context = r#"{"a": "<", "b": ">"}"#;
    assert_eq!(sum("a + ('&'|safe) + b", context).unwrap(), "&lt;&&gt;");
    assert_eq!(sum("a + b + ('&'|safe)", context).unwrap(), "&lt;&gt;&");
    assert_eq!(sum("('&'|safe) + a + b", context).unwrap(), "&&lt;&gt;");
    assert_eq!(sum("a + b", context).unwrap(), "<>");
}

#[test]
fn printed_sums_of_other_values_raise_the_errors_of_python() {
    let context = r#"{"a": "one", "none": null}"#;
    assert!(sum("a + 1", context).unwrap_err().contains("can only concatenate str (not \"int\") to str"));
    assert!(sum("a + 'b' + none", context).unwrap_err().contains("can only concatenate str"));
    assert!(sum("1 + a", context).unwrap_err().contains("unsupported operand"));
    assert!(sum("a + missing", context).unwrap_err().contains("'missing' is undefined"));
    // The left side raises first.
    assert!(sum("missing + raise_exception('late')", context).unwrap_err().contains("late"));
    assert!(sum("raise_exception('early') + missing", context).unwrap_err().contains("early"));
}

#[test]
fn printed_sums_are_limited_as_strings_are() {
    let half = "x".repeat(MAX_SIZE / 2);
    let context = format!(r#"{{"half": "{half}"}}"#);
    assert_eq!(render("{{ half + half }}", &context).unwrap().len(), MAX_SIZE);
    assert!(sum("half + half + 'x'", &context).unwrap_err().contains("MemoryError"));
}
