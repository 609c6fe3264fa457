%% An exchange type with the documented answer of RabbitMQ's delayed-message plugin, for tests: a
%% message with a header x-delay has no route now, and is routed, as by a direct exchange, when its
%% milliseconds are over. It is held in memory. For the RabbitMQ of Debian 12.
-module(outbox_delayed).
-behaviour(rabbit_exchange_type).
-include_lib("rabbit_common/include/rabbit.hrl").
-include_lib("rabbit_common/include/rabbit_framing.hrl").

-rabbit_boot_step(
   {?MODULE,
    [{description, "a delayed exchange for tests"},
     {mfa, {rabbit_registry, register, [exchange, <<"x-delayed-message">>, ?MODULE]}},
     {requires, rabbit_registry},
     {enables, recovery}]}).

-export([description/0, serialise_events/0, info/1, info/2, route/2, validate/1,
         validate_binding/2, create/2, delete/3, policy_changed/2, add_binding/3,
         remove_bindings/3, assert_args_equivalence/2]).

route(#exchange{name = Exchange}, #delivery{message = Message} = Delivery) ->
    Keys = Message#basic_message.routing_keys,
    case delay(Message#basic_message.content) of
        Delay when Delay > 0, Delay < 16#100000000 ->
            spawn(fun() -> timer:sleep(Delay), deliver(Exchange, Keys, Delivery) end),
            [];
        _ ->
            rabbit_router:match_routing_key(Exchange, Keys)
    end.

deliver(Exchange, Keys, Delivery) ->
    Queues = rabbit_amqqueue:lookup(rabbit_router:match_routing_key(Exchange, Keys)),
    Later = Delivery#delivery{mandatory = false, confirm = false, sender = self()},
    rabbit_amqqueue:deliver(Queues, Later).

delay(Content) ->
    #content{properties = Properties} = rabbit_binary_parser:ensure_content_decoded(Content),
    case Properties#'P_basic'.headers of
        undefined -> 0;
        Headers -> number(rabbit_misc:table_lookup(Headers, <<"x-delay">>))
    end.

number({longstr, Text}) -> binary_to_integer(Text);
number({_, Number}) when is_float(Number) -> trunc(Number);
number({_, Number}) when is_integer(Number) -> Number;
number(_) -> 0.

description() -> [{description, <<"A delayed exchange for tests">>}].
serialise_events() -> false.
info(_) -> [].
info(_, _) -> [].
validate(_) -> ok.
validate_binding(_, _) -> ok.
create(_, _) -> ok.
delete(_, _, _) -> ok.
policy_changed(_, _) -> ok.
add_binding(_, _, _) -> ok.
remove_bindings(_, _, _) -> ok.
assert_args_equivalence(Exchange, Args) -> rabbit_exchange:assert_args_equivalence(Exchange, Args).
