//! Contexts in JSON, and long strings of messages that a rendering does not copy.

use super::{Context, Options, Rendered, Template};

fn template(source: &str) -> Template {
    Template::compile(source).unwrap_or_else(|error| panic!("{error}"))
}

fn context<'a>(variables: &'a str, messages: &'a str) -> Context<'a> {
    Context { variables: variables.as_bytes(), messages: messages.as_bytes(), aliases: true }
}

fn printed(value: &str) -> Result<String, String> {
    let variables = format!(r#"{{"x": {value}}}"#);
    template("{{ x }}").render(context(&variables, ""), Options::default()).map_err(|error| error.to_string())
}

#[test]
fn values_are_those_of_python() {
    for (json, text) in [
        ("[1, -2.50, 1e3, true, false, null]", "[1, -2.5, 1000.0, True, False, None]"),
        ("12345678901234567890123", "12345678901234567890123"),
        ("-170141183460469231731687303715884105728", "-170141183460469231731687303715884105728"),
        (r#"{"a" : "b", "c": {}, "a": []}"#, "{'a': [], 'c': {}}"),
        (r#""\u00e9\n\"\\\/\ud83d\ude00""#, "\u{e9}\n\"\\/\u{1f600}"),
        (r#""\\""#, "\\"),
        ("[-0, -0.0, 1e308]", "[0, -0.0, 1e+308]"),
    ] {
        assert_eq!(printed(json).as_deref(), Ok(text), "{json}");
    }
}

#[test]
fn other_texts_are_errors() {
    for json in [
        "",
        "01",
        "1.",
        "1e",
        "1E400",
        "-",
        "tru",
        "[1",
        "[1,]",
        "{\"a\"}",
        "{\"a\":1,}",
        "{1:2}",
        "\"a",
        "\"\\x\"",
        "\"\\ud800\"",
        "\"\\ud800\\u0041\"",
        "\"\\udc00\"",
        "\"\\u12\"",
        "\"\n\"",
        "1 2",
        "\"\\u+123\"",
    ] {
        assert!(printed(json).is_err(), "{json}");
    }
    let nested = |depth: usize| printed(&format!("{}{}", "[".repeat(depth), "]".repeat(depth)));
    assert!(nested(100).is_ok());
    assert!(nested(200).unwrap_err().contains("nesting"));
}

/// Messages with one long content that has escapes, and its text.
fn long_message(edges: (&str, &str)) -> (String, String) {
    let inner = r#"A line with \"quotes\", \u00e9, \\ and \t.\n"#.repeat(20);
    let json = format!(r#"[{{"role": "user", "content": "{}{inner}{}"}}]"#, edges.0, edges.1);
    let text = "A line with \"quotes\", \u{e9}, \\ and \t.\n".repeat(20);
    (json, text)
}

fn render(source: &str, messages: &str) -> (Rendered, String) {
    let template = template(source);
    let rendered = template.render_with_holes(context("{}", messages), Options::default());
    let whole = template.render(context("{}", messages), Options::default());
    (rendered.unwrap_or_else(|error| panic!("{error}")), whole.unwrap_or_else(|error| panic!("{error}")))
}

/// Joins a rendering as C++ would.
fn joined(rendered: &Rendered, messages: &str) -> String {
    let (mut text, mut copied) = (String::new(), 0);
    for hole in &rendered.holes {
        text.push_str(&rendered.text[copied..hole.at]);
        text.push_str(&super::quoted::unescape(messages[hole.begin..hole.end].as_bytes()).unwrap());
        copied = hole.at;
    }
    text + &rendered.text[copied..]
}

#[test]
fn long_messages_that_are_printed_are_holes() {
    let (messages, text) = long_message(("<", ">"));
    for source in [
        "<u>{{ messages[0].content }}</u>",
        "{{ '<u>' + messages[0]['content'] + '</u>' }}",
        "<u>{% for m in messages %}{{ m.content }}{% endfor %}</u>",
        "{% macro show(c) %}{{ c }}{% endmacro %}<u>{{ show(messages[0].content) }}</u>",
        "{% set c = messages[0].content %}{% if c is string and c %}<u>{{ c | trim }}</u>{% endif %}",
        "<u>{% set c %}{{ messages[0].content.strip() }}{% endset %}{{ c }}</u>",
        "{% set c = messages[0].content %}{% if not c.startswith('a') and not c.endswith('b') %}<u>{{ c }}</u>{% endif %}",
        "{% set c = messages[0].content %}{{ '<u>' if '\"' in c }}{{ c }}</u>",
        "{% generation %}<u>{{ messages[0].content }}{% endgeneration %}</u>",
    ] {
        let (rendered, whole) = render(source, &messages);
        assert_eq!(whole, format!("<u><{text}></u>"), "{source}");
        assert_eq!(rendered.holes.len(), 1, "{source}");
        assert_eq!(rendered.text, "<u></u>", "{source}");
        assert_eq!(joined(&rendered, &messages), whole, "{source}");
    }
}

#[test]
fn texts_made_of_long_messages_are_copies() {
    let (messages, text) = long_message((" ", "\\n"));
    for (source, wanted) in [
        ("{{ messages[0].content | trim }}", text.trim().to_string()),
        ("{{ messages[0].content.rstrip() }}", format!(" {}", text.trim())),
        ("{{ messages[0].content[1:3] }}", "A ".to_string()),
        ("{{ messages[0].content ~ '' }}", format!(" {text}\n")),
        ("{{ messages[0].content.startswith(' A line with \"') }}", "True".to_string()),
        ("{{ messages[0].content.endswith('.\n\n') }}", "True".to_string()),
        (
            "{{ messages[0].content.startswith('A') or messages[0].content.endswith('n') }}",
            "False".to_string(),
        ),
        ("{{ messages[0].content == messages[0].content ~ '' }}", "True".to_string()),
        ("{{ messages[0].content | length }}", (text.chars().count() + 2).to_string()),
    ] {
        let (rendered, whole) = render(source, &messages);
        assert_eq!(whole, wanted, "{source}");
        assert!(rendered.holes.is_empty(), "{source}");
        assert_eq!(rendered.text, whole, "{source}");
    }
}

/// Renders messages whose contents are `contents` again and again with one template; a template that is new for each
/// of them must give the same.
fn renders_alike(source: &str, roles: &[&str], contents: &[&str]) {
    let shared = template(source);
    for role in roles {
        for content in contents {
            let messages = format!(
                r#"[{{"role": "{role}", "content": "{content}"}}, {{"role": "user", "content": "{content}"}}]"#
            );
            for options in [Options::default(), Options { may_mutate: true, now: Some(content.len() as i64) }]
            {
                let context = context(r#"{"bos": "<s>"}"#, &messages);
                let known = shared.render_with_holes(context, options).map(|r| joined(&r, &messages));
                let fresh = template(source).render(context, options);
                assert_eq!(
                    known.map_err(|error| error.to_string()),
                    fresh.map_err(|error| error.to_string()),
                    "{source} {role} {content}"
                );
            }
        }
    }
}

#[test]
fn renderings_of_one_skeleton_are_those_of_new_templates() {
    let (a, b, c) = ("a".repeat(300), "b".repeat(5000), format!(" {}", "c".repeat(300)));
    let (d, e) = (format!(r#"{}\n"#, "d".repeat(300)), format!(r#"\"{}\\"#, "e".repeat(400)));
    let contents = ["x", &a, &b, &a, "", &c, &d, &e, &a, &c, "y", &b, &e, &d];
    for source in [
        "{{ bos }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
        "{{ bos }}{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}",
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '</>' }}{% endfor %}{{ messages[0].content }}",
        "{% for m in messages %}{% if m.content == messages[0].content %}{{ m.content }}{% endif %}{% endfor %}",
        "{% for m in messages %}{% if m.content == 'x' %}X{% elif m.content %}{{ m.content }}{% endif %}{% endfor %}",
        "{% for m in messages %}{{ m.content if m.content.startswith('a') else m.role }}{% endfor %}",
        "{% for m in messages %}{{ m.content if m.content.endswith('b') else m.role }}{% endfor %}",
        "{% for m in messages %}{{ m.content | length }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m | tojson }}{{ m.content }}{% endfor %}",
        "{% set d = {messages[0].content: 1} %}{{ d[messages[1].content] }}{{ messages[0].content }}",
        "{{ strftime_now('%S') if messages[0].role == 'clock' and bos else '' }}{{ messages[0].content }}",
        "{% if messages[0].content %}{{ raise_exception('refused ' + messages[0].role) }}{% endif %}{{ bos }}",
        "{% set n = namespace(t='') %}{% for m in messages %}{% set n.t = n.t + m.content %}{% endfor %}{{ n.t }}",
    ] {
        renders_alike(source, &["system", "user", "user"], &contents);
    }
    let long_key = format!(r#"[{{"{a}": 1, "content": "{b}"}}]"#);
    let other_key = format!(r#"[{{"{}": 2, "content": "{b}"}}]"#, "z".repeat(300));
    let keys = template("{{ messages[0] | list | first | upper }}{{ messages[0].content }}");
    for messages in [&long_key, &other_key] {
        let rendered = keys
            .render_with_holes(context("{}", messages), Options::default())
            .unwrap_or_else(|e| panic!("{e}"));
        assert!(joined(&rendered, messages).starts_with(&messages[3..303].to_uppercase()));
    }
}

#[test]
fn a_rendering_that_reads_the_clock_is_made_again() {
    let shared = template("{{ strftime_now('%S') }}{{ messages[0].content }}");
    let messages = format!(r#"[{{"content": "{}"}}]"#, "a".repeat(300));
    for now in [5, 6] {
        let options = Options { may_mutate: false, now: Some(now) };
        let rendered =
            shared.render_with_holes(context("{}", &messages), options).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(rendered.text, format!("0{now}"));
    }
}

#[test]
fn a_long_message_that_is_no_text_is_an_error_when_it_is_read() {
    let messages = format!(r#"[{{"content": "{}\ud800"}}]"#, "a".repeat(500));
    let source = template("{{ messages[0].content | upper }}");
    assert!(source.render_with_holes(context("{}", &messages), Options::default()).is_err());
    assert!(template("{{ messages[0].content }}")
        .render(context("{}", &messages), Options::default())
        .is_err());
    assert!(template("{{ messages | length }}").render(context("{}", &messages), Options::default()).is_ok());
}

#[test]
fn variables_come_before_messages_and_reasoning_has_three_names() {
    let shown = |source: &str, variables: &str, messages: &str| {
        template(source)
            .render(context(variables, messages), Options::default())
            .unwrap_or_else(|error| panic!("{error}"))
    };
    assert_eq!(shown("{{ messages }}", r#"{"messages": [1]}"#, "[2]"), "[1]");
    assert_eq!(
        shown("{{ messages[0] }}", "{}", r#"[{"role": "r", "reasoning": "x"}]"#),
        "{'thinking': 'x', 'role': 'r', 'reasoning': 'x', 'reasoning_content': 'x'}"
    );
}
